"""The frontend: from a captured ATen graph to Relax. Its import registers all converters."""

from tvmbridge.frontend import (  # noqa: F401  (each module enters its converters)
    activations,
    backward,
    compiled,
    convolution,
    creation,
    elementwise,
    linear,
    logic,
    nests,
    nn,
    norms,
    pooling,
    reductions,
    shapes,
)
from tvmbridge.frontend.importer import ImportedModule, import_graph, to_relax

__all__ = ["ImportedModule", "import_graph", "to_relax"]
