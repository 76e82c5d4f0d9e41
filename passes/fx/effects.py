"""Side effects: which nodes of a graph must keep their order, and how to sort the others."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from tvmbridge.passes.fx.base import LEAVES, is_operator

# Operators whose results may be views of their first argument although the schema does not say so.
_MAY_ALIAS = frozenset(
    {"reshape", "reshape_as", "contiguous", "flatten", "unflatten", "ravel", "to", "type_as"}
    | {"expand_as", "view_as", "dropout", "movedim", "moveaxis", "swapaxes", "chunk", "narrow"}
    | {"tensor_split", "broadcast_to", "squeeze", "atleast_1d", "atleast_2d", "numpy_T"}
    | {
        "matrix_H",
        "wait_tensor",
        "cpu",
        "cuda",
        "resolve_conj",
        "resolve_neg",
        "adjoint",
        "swapdims",
    }
)


class CircularError(Exception):
    """No order of the nodes satisfies both their data dependences and the order of side effects."""


def is_pure(node: fx.Node) -> bool:
    """Whether the node has no side effect: it draws no random numbers and writes no tensor.

    Higher-order operators count as impure: their graphs may do anything.
    """
    if node.op in LEAVES or node.op == "output":
        return True
    if is_operator(node):
        target: Any = node.target
        return not (target._schema.is_mutable or draws(node))
    return node.op == "call_function" and not _runs_graphs(node)


def draws(node: fx.Node) -> bool:
    """Whether the operator draws random numbers; dropout in eval mode does not."""
    target: Any = node.target
    if not is_operator(node) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if target is torch.ops.aten.dropout.default:
        return bool(node.args[1]) and node.args[2] is not False
    return True


def _runs_graphs(node: fx.Node) -> bool:
    """Whether the node calls a higher-order operator, whose graphs may do anything."""
    return any(a.op == "get_attr" and "." not in str(a.target) for a in node.all_input_nodes) and (
        type(node.target).__module__.startswith("torch._higher_order_ops")
        or getattr(node.target, "__module__", "").startswith("torch._higher_order_ops")
    )


def views_of(node: fx.Node) -> bool:
    """Whether the result may share memory with an argument."""
    if node.op == "call_function" and not is_operator(node):
        return True  # such as getitem
    if not is_operator(node):
        return False
    target: Any = node.target
    name = target._schema.name.partition("::")[2]
    return name in _MAY_ALIAS or any(r.alias_info is not None for r in target._schema.returns)


def written(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the nodes whose memory an operator of the graph writes, or may write."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        roots[node] = roots[inputs[0]] if inputs and views_of(node) else node
    touched = {roots[each] for node in graph.nodes for each in _writes(node)}
    return frozenset(node for node, root in roots.items() if root in touched)


def _writes(node: fx.Node) -> Iterator[fx.Node]:
    if not is_operator(node):
        if node.op == "call_function" and _runs_graphs(node):
            yield from node.all_input_nodes
        return
    target: Any = node.target
    for index, argument in enumerate(target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        found: list[fx.Node] = []
        fx.map_arg(given, found.append)
        yield from found


def ordered(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes to keep in order: with a side effect, or on a tensor that is written."""
    reached = written(graph)
    return [
        node
        for node in graph.nodes
        if node.op not in (*LEAVES, "output")
        and (
            not is_pure(node) or node in reached or any(a in reached for a in node.all_input_nodes)
        )
    ]


def needs(graph: fx.Graph, chains: Sequence[Sequence[fx.Node]]) -> dict[fx.Node, set[fx.Node]]:
    """Return each node's predecessors: the nodes that it reads, its neighbour in a chain."""
    before: dict[fx.Node, set[fx.Node]] = {n: set(n.all_input_nodes) for n in graph.nodes}
    for chain in chains:
        for earlier, later in pairwise(n for n in chain if n in before):
            before[later].add(earlier)
    return before


def sort(
    graph: fx.Graph, priority: Mapping[fx.Node, float], chains: Sequence[Sequence[fx.Node]]
) -> None:
    """Reorder the graph so that each node comes after the nodes that it reads.

    The placeholders stay first, the output last.

    Args:
        priority: of the nodes that may come next, the one with the least priority does.
        chains: lists of nodes that keep their order.

    Raises:
        CircularError: there is no such order.
    """
    before = needs(graph, chains)
    after: dict[fx.Node, list[fx.Node]] = {n: [] for n in before}
    for node, needed in before.items():
        for each in needed:
            after[each].append(node)
    ranks = {"placeholder": 0, "output": 2}
    numbers = {n: i for i, n in enumerate(before)}

    def key(node: fx.Node) -> tuple[int, float, int, fx.Node]:
        return ranks.get(node.op, 1), priority.get(node, 0.0), numbers[node], node

    open_ = {n: len(needed) for n, needed in before.items()}
    heap = [key(n) for n in before if not open_[n]]
    heapq.heapify(heap)
    done: list[fx.Node] = []
    while heap:
        node = heapq.heappop(heap)[-1]
        done.append(node)
        for later in after[node]:
            open_[later] -= 1
            if not open_[later]:
                heapq.heappush(heap, key(later))
    if len(done) < len(before):
        raise CircularError("effects would have to change their order")
    arrange(done)


def arrange(nodes: Sequence[fx.Node]) -> None:
    """Reorder a graph in place; ``nodes`` are all its nodes in the new order."""
    for earlier, later in pairwise(nodes):
        if earlier.next is not later:
            earlier.append(later)
