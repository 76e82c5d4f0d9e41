"""The policy ``save_all``, which keeps all that backward reads, and ``recompute_cheap``.

Both repeat constants, views, and casts and simple arithmetic on primals. So a dropout mask is kept
in its one byte an element, and not as the factor that is computed from it.
"""

from __future__ import annotations

from tvm import relax

from tvmbridge.coloring.graph import JointGraph
from tvmbridge.coloring.operators import is_elementwise, is_view, operator_name

_LIGHT = frozenset(f"relax.{name}" for name in ("astype", "multiply", "power", "add", "subtract"))


def save_all(graph: JointGraph) -> frozenset[relax.Var]:
    """Return the forward variables that backward computes again; forward keeps the others."""
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


def recompute_cheap(graph: JointGraph) -> frozenset[relax.Var]:
    """Return the forward variables that backward computes again, more than under ``save_all``.

    Results of element-wise operators are among them if backward has the operands in memory anyway.
    The policy goes once over the values that ``save_all`` keeps. It never keeps a further value so
    that another one can be computed from it, and it compares no alternatives.
    """
    repeated = set(save_all(graph))
    kept = graph.kept(repeated)
    # The values that are kept, or that backward repeats from these: operands at no extra cost.
    at_hand = set(kept) | {p for p in graph.primals if not graph.nbytes(p)}
    for var, value in graph.bound.items():
        if not all(v in at_hand for v in graph.operands[var]):
            continue
        if var in repeated:
            at_hand.add(var)
        elif var in kept and graph.nbytes(var) and graph.may_repeat(var) and is_elementwise(value):
            repeated.add(var)
    return frozenset(repeated)
