"""The policy ``keep_operands``: the fewest bytes, but what a kernel of PyTorch reads is kept.

What backward computes again for loops of its own is never written to memory. For a product or an
ATen call it would be, which on a GPU takes longer than to read what forward had written for the
same kind of reader. Eager PyTorch keeps these values too.
"""

from __future__ import annotations

from tvm import relax

from tvmbridge.coloring.graph import JointGraph
from tvmbridge.coloring.min_cut import min_cut
from tvmbridge.coloring.operators import fuses, is_view


def keep_operands(graph: JointGraph) -> frozenset[relax.Var]:
    """The variables that backward computes rather than reads."""
    return min_cut(graph, read_in_memory(graph))


def read_in_memory(graph: JointGraph) -> frozenset[relax.Var]:
    """Forward variables that an operator of backward reads, through views, which does not fuse."""
    pending = [
        v for var in graph.backward if not fuses(graph.bound[var]) for v in graph.operands[var]
    ]
    found = set()
    while pending:
        var = pending.pop()
        if var in graph.bound and is_view(graph.bound[var]):
            pending.extend(graph.operands[var])
        elif var in graph.forward:
            found.add(var)
    return frozenset(found)
