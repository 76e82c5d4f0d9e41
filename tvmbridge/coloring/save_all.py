"""The policy ``save_all``: keep every forward value that backward reads.

Exceptions are constants, views, and casts and simple arithmetic on primals, which are repeated. So
a dropout mask is kept in its one byte an element, and not as the factor that is computed from it.
"""

from __future__ import annotations

from tvm import relax

from tvmbridge.coloring.graph import JointGraph
from tvmbridge.coloring.operators import is_view, operator_name

_LIGHT = frozenset(f"relax.{name}" for name in ("astype", "multiply", "power", "add", "subtract"))


def save_all(graph: JointGraph) -> frozenset[relax.Var]:
    """Return the variables that backward computes itself, instead of reading forward's values."""
    repeated: set[relax.Var] = set()
    from_inputs: set[relax.Var] = set(graph.primals)
    for var, value in graph.bound.items():
        if var not in graph.forward:
            continue
        light = is_view(value) or operator_name(value) in _LIGHT
        of_inputs = light and all(v in from_inputs for v in graph.operands[var])
        # A tuple cannot be kept, but its items can.
        if (is_view(value) or graph.nbytes(var) is None or of_inputs) and graph.may_repeat(var):
            repeated.add(var)
        if of_inputs and var in repeated:
            from_inputs.add(var)
    return graph.early | repeated
