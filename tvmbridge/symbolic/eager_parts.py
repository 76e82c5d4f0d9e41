"""The parts of forward that PyTorch runs, its prologue and its epilogue, in code for any size.

Both are FX graphs that run in eager PyTorch at each call. Their descriptions at several sizes are
combined as the other descriptions of a module are (:mod:`.descriptions`): they may differ in
numbers alone. The graphs are made again from the description at a call's sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import fx, nn

from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.symbolic.sizes import DifferentCodeError


class _Earlier(NamedTuple):
    """The result of an earlier node of a graph, by a text with its number."""

    of: str


class _SliceFields(NamedTuple):
    """The fields of a slice."""

    start: Any
    stop: Any
    step: Any


class _Node(NamedTuple):
    """A node of a graph: its kind, what it calls, and the arguments."""

    op: str
    target: Any
    args: Any
    kwargs: Any


@dataclass(frozen=True)
class EagerParts:
    """A description of the prologue and of the epilogue of a captured graph.

    - ``reads``: the names of the inputs that the prologue reads.
    - ``prologue``, ``epilogue``: the nodes of the graphs; empty without such a part.
    """

    reads: tuple[str, ...]
    prologue: tuple[_Node, ...]
    epilogue: tuple[_Node, ...]


def described_parts(captured: CapturedGraph) -> EagerParts:
    """Return the description of the eager parts of ``captured``.

    Raises:
        DifferentCodeError: the prologue reads a tensor that forward makes for one size.
    """
    prologue, epilogue = captured.prologue, captured.epilogue
    if prologue is not None and prologue.module.graph.find_nodes(op="get_attr"):
        raise DifferentCodeError("its random draws read a tensor that forward makes for one size")
    return EagerParts(
        () if prologue is None else prologue.reads,
        () if prologue is None else _nodes(prologue.module.graph),
        () if epilogue is None else _nodes(epilogue.graph),
    )


def with_parts(captured: CapturedGraph, whole: CapturedGraph, parts: EagerParts) -> CapturedGraph:
    """Return ``captured`` with the eager parts of ``whole``, and the numbers of ``parts``."""
    prologue, epilogue, known = whole.prologue, whole.epilogue, described_parts(whole)
    if prologue is not None and parts.prologue != known.prologue:
        prologue = replace(prologue, module=fx.GraphModule(nn.Module(), _graph(parts.prologue)))
    if epilogue is not None and parts.epilogue != known.epilogue:
        epilogue = replace(epilogue, graph=_graph(parts.epilogue))
    return replace(captured, prologue=prologue, epilogue=epilogue)


def _nodes(graph: fx.Graph) -> tuple[_Node, ...]:
    results: dict[fx.Node, _Earlier] = {}

    def described(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return results[value]
        if isinstance(value, slice):
            return _SliceFields(*map(described, (value.start, value.stop, value.step)))
        if isinstance(value, tuple | list):
            return type(value)(map(described, value))
        return {k: described(v) for k, v in value.items()} if isinstance(value, dict) else value

    found = []
    for node in graph.nodes:
        found.append(_Node(node.op, node.target, described(node.args), described(node.kwargs)))
        results[node] = _Earlier(str(len(results)))
    return tuple(found)


def _graph(nodes: tuple[_Node, ...]) -> fx.Graph:
    graph, results = fx.Graph(), list[fx.Node]()

    def made(value: Any) -> Any:
        if isinstance(value, _Earlier):
            return results[int(value.of)]
        if isinstance(value, _SliceFields):
            return slice(*map(made, value))
        if isinstance(value, tuple | list):
            return type(value)(map(made, value))
        return {k: made(v) for k, v in value.items()} if isinstance(value, dict) else value

    for node in nodes:
        made_node = graph.create_node(node.op, node.target, made(node.args), made(node.kwargs))
        results.append(made_node)
    return graph
