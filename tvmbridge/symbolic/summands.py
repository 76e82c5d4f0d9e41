"""Give sums of integers one order of their summands in the code for all sample sizes.

TVM's simplifier orders summands by their divisors: ``x // 3 + y // 5`` at one size is
``y // 2 + x // 7`` at another. The summands are equal in everything except numbers, so that the
order of the first sample serves for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

SUM = "prim.Add"
_VARIABLE, _INTEGER = "ir.Var", "ir.IntImm"
_NUMBERS = (_INTEGER, "ir.FloatImm", "int", "float")


def in_one_order(
    graphs: Sequence[list[Any]],
    at: tuple[int, ...],
    bound: Mapping[tuple[int, int], int],
    operands: Callable[[Any], Sequence[int]],
) -> tuple[int, ...]:
    """Return the nodes of a sum in each graph, with the summands in the order of the first graph.

    New nodes are added to the graphs. Return ``at`` if the summands have one order already, or
    are not the same.

    Args:
        graphs: the nodes of each serialized module.
        at: for each graph, the number of the sum's node.
        bound: by graph and number of a variable's node, the number of the variable in the first.
        operands: returns the numbers of the nodes that a node's fields refer to.
    """
    summands = [list(_summands(nodes, i)) for nodes, i in zip(graphs, at, strict=True)]
    brief = [
        [_brief(nodes, i, operands) for i in found]
        for nodes, found in zip(graphs, summands, strict=True)
    ]
    if all(each == brief[0] for each in brief) and len(set(brief[0])) == len(brief[0]):
        return at
    known: dict[tuple[int, int, bool], Any] = {}

    def form(graph: int, number: int, exact: bool) -> Any:
        """Return a node with variables of the first graph, and with its numbers if ``exact``."""
        key = graph, number, exact
        if key not in known:
            node = graphs[graph][number]
            kind, data = node["type"], node.get("data")
            if kind == _VARIABLE and (graph, number) in bound:
                known[key] = kind, bound[graph, number]
            elif kind in _NUMBERS and not exact:
                known[key] = kind
            else:
                plain = None if isinstance(data, dict | list) else data
                if kind == _INTEGER:
                    plain = graphs[graph][data["value"]]["data"]
                known[key] = kind, plain, *(form(graph, i, exact) for i in operands(node))
        return known[key]

    found = [at[0]]
    for graph in range(1, len(graphs)):
        ordered = _matched(
            *([(form(i, n, True), form(i, n, False), n) for n in summands[i]] for i in (0, graph))
        )
        if ordered is None:
            return at
        same = ordered == summands[graph]
        found.append(at[graph] if same else _sum_of(graphs, graph, at, iter(ordered)))
    return tuple(found)


def _matched(
    wanted: Sequence[tuple[Any, Any, int]], others: Sequence[tuple[Any, Any, int]]
) -> list[int] | None:
    """Return the numbers of ``others`` in the order of ``wanted``; None if the forms differ.

    Summands that differ in numbers alone are those with the same numbers, if there are such.
    """
    left, found = list(others), dict[int, int]()
    for part in (0, 1):
        for place, each in enumerate(wanted):
            if place not in found:
                same = next((other for other in left if other[part] == each[part]), None)
                if same is not None:
                    left.remove(same)
                    found[place] = same[2]
    return None if left or len(found) < len(wanted) else [found[i] for i in range(len(wanted))]


def _is_integer_sum(nodes: list[Any], number: int) -> bool:
    node = nodes[number]
    return node["type"] == SUM and _is_integer(nodes, node)


def _is_integer(nodes: list[Any], node: Any) -> bool:
    return str(nodes[node["data"]["ty"]]["data"]["dtype"]).startswith("int")


def _summands(nodes: list[Any], number: int) -> Iterator[int]:
    if not _is_integer_sum(nodes, number):
        yield number
        return
    for operand in ("a", "b"):
        yield from _summands(nodes, nodes[number]["data"][operand])


def _brief(nodes: list[Any], number: int, operands: Callable[[Any], Sequence[int]]) -> Any:
    node = nodes[number]
    return node["type"], *(nodes[i]["type"] for i in operands(node))


def _sum_of(
    graphs: Sequence[list[Any]], graph: int, at: tuple[int, ...], ordered: Iterator[int]
) -> int:
    """Add the sum of ``ordered`` to a graph, with the parentheses of the first graph's sum."""
    nodes = graphs[graph]
    like = nodes[at[graph]]

    def added(number: int) -> int:
        if not _is_integer_sum(graphs[0], number):
            return next(ordered)
        data = graphs[0][number]["data"]
        fields = {**like["data"], "a": added(data["a"]), "b": added(data["b"])}
        nodes.append({**like, "data": fields})
        return len(nodes) - 1

    return added(at[0])
