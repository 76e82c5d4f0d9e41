"""The policy ``min_cut``: keep the fewest bytes from forward to backward.

The policy solves a minimum cut of a flow network over the values that backward needs. Each variable
is an edge from its computation to its uses, with its size in bytes as the capacity. The source
feeds the variables that may be computed only once, and the variables that backward needs feed the
sink. Variables whose edges are cut are kept. Variables between the cut and the sink are computed
again. (The idea of recomputation is from T. Chen et al., "Training Deep Nets with Sublinear Memory
Cost".)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from tvm import relax

from tvmbridge.coloring.graph import JointGraph
from tvmbridge.coloring.operators import is_view
from tvmbridge.coloring.save_all import save_all

# networkx is imported on first use, because inference alone does not need it.
if TYPE_CHECKING:
    import networkx

_SOURCE, _SINK = "source", "sink"
# A value that forward writes only to keep it counts this share of its bytes more.
_WRITING = 1 / 64


def min_cut(
    graph: JointGraph,
    once: Collection[relax.Var] = frozenset(),
    prices: Mapping[relax.Var, float] = MappingProxyType({}),
    written: Collection[relax.Var] | None = None,
) -> frozenset[relax.Var]:
    """Return the variables that backward computes itself, instead of reading forward's values.

    Among cuts of equal size, prefer one that keeps values which forward computes anyway, and among
    these the one that repeats least.

    Source of the method: L. R. Ford and D. R. Fulkerson, "Maximal flow through a network" (1956).

    Args:
        once: variables that backward must not compute again.
        prices: the bytes that a variable must save to be computed again; 0 where it is not given.
        written: variables that forward writes to memory even if they are not kept. Others cost a
            little more than their bytes; None: all cost the same.
    """
    import networkx

    network = _network(graph, once, prices, graph.forward if written is None else written)
    try:
        _, (_, behind) = networkx.minimum_cut(network, _SOURCE, _SINK)
    except networkx.NetworkXUnbounded:
        # A value can be neither kept nor repeated: the caller's check names it.
        return save_all(graph)
    # networkx returns the smallest side of the sink: the nodes that reach it by unsaturated edges.
    movable = frozenset(v for v in graph.movable if (v, "in") in behind)
    return movable | (graph.early - graph.movable)


def _network(
    graph: JointGraph,
    once: Collection[relax.Var],
    prices: Mapping[relax.Var, float],
    written: Collection[relax.Var],
) -> networkx.DiGraph:
    """Build the flow network of the values that backward needs, and of their dependencies."""
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
        if size is None or (var not in once and _is_mere_view(graph, var, size)):
            network.add_edge((var, "in"), (var, "out"))
        else:
            capacity = size * scale + (var in graph.early)
            if var in graph.forward and var not in written:
                capacity += int(size * scale * _WRITING)
            network.add_edge((var, "in"), (var, "out"), capacity=capacity)
        if var not in graph.bound or var in once or not graph.may_repeat(var):
            network.add_edge(_SOURCE, (var, "in"))
            continue
        if prices.get(var):
            network.add_edge(_SOURCE, (var, "in"), capacity=round(prices[var] * scale))
        for operand in graph.operands[var]:
            network.add_edge((operand, "out"), (var, "in"))
            if operand not in seen:
                seen.add(operand)
                pending.append(operand)
    return network


def _is_mere_view(graph: JointGraph, var: relax.Var, size: int) -> bool:
    """Whether ``var`` is a repeatable view whose operands take no more bytes than it does.

    Keeping such a view gains nothing, and forward would have to write it to memory.
    """
    if var not in graph.bound or not is_view(graph.bound[var]) or not graph.may_repeat(var):
        return False
    return all((graph.nbytes(v) or 0) <= size for v in graph.operands[var])
