"""Run the nodes of a graph that depend on no input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from tvmbridge.core.torch_private import OpOverload, pytree

# Constants with more elements are not evaluated.
MOST_ELEMENTS = 1 << 26
CPU = torch.device("cpu")


def is_repeatable(node: fx.Node) -> bool:
    """Whether a node's operator is deterministic and functional."""
    target, value = node.target, node.meta.get("val")
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return False
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return isinstance(value, torch.Tensor)


def run_on_cpu(node: fx.Node, values: Mapping[fx.Node, Any]) -> torch.Tensor | None:
    """Return the result of a node, by the ``values`` of its inputs; None: it is no tensor."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    # With the same results: a GPU would need a synchronization.
    args, kwargs = pytree.tree_map_only(torch.device, lambda _: CPU, (args, kwargs))
    with torch.no_grad():
        result = node.target(*args, **kwargs)  # type: ignore[operator]
    return result if isinstance(result, torch.Tensor) else None
