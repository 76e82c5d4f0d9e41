"""The policy ``recompute_cheap``: what is element-wise in values that are kept anyway is repeated.

A greedy rule over what ``save_all`` keeps: no value is kept for the sake of another, and nothing
is searched.
"""

from __future__ import annotations

from tvm import relax

from tvmbridge.coloring.graph import JointGraph
from tvmbridge.coloring.operators import is_elementwise
from tvmbridge.coloring.save_all import save_all


def recompute_cheap(graph: JointGraph) -> frozenset[relax.Var]:
    """The variables that backward computes rather than reads."""
    repeated = set(save_all(graph))
    kept = graph.kept(repeated)
    # What backward has, or repeats from what it has. A value that moves from one to the other
    # stays at hand.
    at_hand = set(kept) | {p for p in graph.primals if not graph.nbytes(p)}
    for var, value in graph.bound.items():
        if not all(v in at_hand for v in graph.operands[var]):
            continue
        if var in repeated:
            at_hand.add(var)
        elif var in kept and graph.nbytes(var) and graph.may_repeat(var) and is_elementwise(value):
            repeated.add(var)
    return frozenset(repeated)
