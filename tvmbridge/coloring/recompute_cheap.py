"""The policy ``recompute_cheap``: repeat element-wise operators whose operands backward has anyway.

The policy goes once over the values that ``save_all`` keeps, in program order. It keeps no
additional value in order to repeat another, and it searches no alternatives.
"""

from __future__ import annotations

from tvm import relax

from tvmbridge.coloring.graph import JointGraph
from tvmbridge.coloring.operators import is_elementwise
from tvmbridge.coloring.save_all import save_all


def recompute_cheap(graph: JointGraph) -> frozenset[relax.Var]:
    """Return the variables that backward computes itself, instead of reading forward's values."""
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
