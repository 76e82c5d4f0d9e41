"""Write a module's forward as text of Relay, the graph language of TVM up to 0.19."""

from __future__ import annotations

# Each file registers its converters when it is imported.
from tvmbridge.relay import (
    activations,
    attention,
    bags,
    convolution,
    elementwise,
    indexing,
    linear,
    logic,
    norms,
    pooling,
    reductions,
    resizing,
    shapes,
)
from tvmbridge.relay.api import RelayText, to_relay

__all__ = [
    "RelayText",
    "activations",
    "attention",
    "bags",
    "convolution",
    "elementwise",
    "indexing",
    "linear",
    "logic",
    "norms",
    "pooling",
    "reductions",
    "resizing",
    "shapes",
    "to_relay",
]
