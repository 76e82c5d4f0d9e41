"""The frontend: captured ATen graph -> Relax. Importing it fills the converter table."""

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
