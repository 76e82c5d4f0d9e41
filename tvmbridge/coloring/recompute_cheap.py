"""The policy ``recompute_cheap``: what is element-wise in values that are kept anyway is repeated.

A greedy rule over what ``save_all`` keeps, from the last value to the first: no value is kept for
the sake of another, and nothing is searched.
"""

from __future__ import annotations

from tvm import relax

from tvmbridge.coloring.graph import JointGraph
from tvmbridge.coloring.operators import is_elementwise
from tvmbridge.coloring.save_all import save_all


def recompute_cheap(graph: JointGraph) -> frozenset[relax.Var]:
    """The forward variables that backward computes again rather than keeps."""
    repeated = set(save_all(graph))
    kept = graph.kept(repeated)
    free = {p for p in graph.primals if not graph.nbytes(p)}
    for var in reversed(graph.bound):
        if var not in kept or not graph.nbytes(var) or not graph.may_repeat(var):
            continue
        if not is_elementwise(graph.bound[var]):
            continue
        if all(_at_hand(graph, v, repeated, kept, free) for v in graph.operands[var]):
            repeated.add(var)
            del kept[var]
    return frozenset(repeated)


def _at_hand(
    graph: JointGraph,
    var: relax.Var,
    repeated: set[relax.Var],
    kept: dict[relax.Var, None],
    free: set[relax.Var],
) -> bool:
    """Whether backward has ``var``, or repeats it from what it has."""
    if var in kept or var in free:
        return True
    return var in repeated and all(
        _at_hand(graph, v, repeated, kept, free) for v in graph.operands[var]
    )
