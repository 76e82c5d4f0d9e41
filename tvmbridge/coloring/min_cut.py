"""The policy ``min_cut``: the fewest bytes between forward and backward.

A maximum-flow problem over the forward color. Every variable is an edge of its bytes from its
computation to its use; the source is what may run only once, the sink what backward needs. The
variables whose edges a minimum cut severs are kept, those behind it are computed again. (The idea
is that of T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", as a flow.)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from tvm import relax

from tvmbridge.coloring.graph import JointGraph
from tvmbridge.coloring.operators import is_view
from tvmbridge.coloring.save_all import save_all

# Imported when it is used: modules that serve inference alone take no flows.
if TYPE_CHECKING:
    import networkx

_SOURCE, _SINK = "source", "sink"


def min_cut(graph: JointGraph, once: Collection[relax.Var] = frozenset()) -> frozenset[relax.Var]:
    """The variables that backward computes rather than reads; ``once``: only forward does.

    Of several cuts of the same size it is one that keeps what forward has anyway, and of those
    the one with the least to compute again.

    Source of the method: L. R. Ford and D. R. Fulkerson, "Maximal flow through a network" (1956).
    """
    import networkx

    network = _network(graph, once)
    try:
        _, (_, behind) = networkx.minimum_cut(network, _SOURCE, _SINK)
    except networkx.NetworkXUnbounded:
        return save_all(graph)  # what can be neither kept nor repeated is named by its caller
    # The sink's side is what reaches the sink when the saturated edges are gone: the smallest one.
    movable = frozenset(v for v in graph.movable if (v, "in") in behind)
    return movable | (graph.early - graph.movable)


def _network(graph: JointGraph, once: Collection[relax.Var]) -> networkx.DiGraph:
    """The flow network of what backward needs and what that depends on."""
    import networkx

    network = networkx.DiGraph()
    network.add_nodes_from((_SOURCE, _SINK))
    pending, seen = list(graph.needed), set(graph.needed)
    scale = len(graph.early) + 1
    for var in graph.needed:
        network.add_edge((var, "out"), _SINK)
    while pending:
        var = pending.pop()
        size = graph.nbytes(var)
        if size is None or _is_mere_view(graph, var, size):
            network.add_edge((var, "in"), (var, "out"))
        else:
            capacity = size * scale + (var in graph.early)
            network.add_edge((var, "in"), (var, "out"), capacity=capacity)
        if var not in graph.bound or var in once or not graph.may_repeat(var):
            network.add_edge(_SOURCE, (var, "in"))
            continue
        for operand in graph.operands[var]:
            network.add_edge((operand, "out"), (var, "in"))
            if operand not in seen:
                seen.add(operand)
                pending.append(operand)
    return network


def _is_mere_view(graph: JointGraph, var: relax.Var, size: int) -> bool:
    """Whether ``var`` is a view of what costs no more: kept, it would have to be written out."""
    if var not in graph.bound or not is_view(graph.bound[var]) or not graph.may_repeat(var):
        return False
    return all((graph.nbytes(v) or 0) <= size for v in graph.operands[var])
