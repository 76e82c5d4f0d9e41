"""Find equal slices of one tensor, and view that tensor with a dimension that counts them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tvmbridge.passes.fx.base import Emitter, bound_arguments, known, shape_of

aten = torch.ops.aten
_SPLITS = (
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.split.sizes,
    aten.chunk.default,
)


@dataclass(frozen=True)
class Slice:
    """A node that is a slice of another node's tensor.

    - ``node``: the slice.
    - ``source``: the node that is sliced.
    - ``dim``: the dimension that is sliced.
    - ``start``: the first index of the slice in ``dim``.
    - ``width``: the extent of the slice in ``dim``; None if the slice lacks the dimension.
    """

    node: fx.Node
    source: fx.Node
    dim: int
    start: int
    width: int | None


def slices_of(graph: fx.Graph) -> Iterator[Slice]:
    """Yield all slices of the graph whose start is known."""
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        shape = shape_of(source)
        if node.op != "call_function" or not isinstance(source, fx.Node) or shape is None:
            continue
        if node.target in _SPLITS:
            yield from _parts(node, source)
        elif node.target is aten.unbind.int:
            given = bound_arguments(node)
            yield from _items(node, source, int(given["dim"]) % len(shape))
        elif node.target is aten.select.int:
            given = bound_arguments(node)
            dim, index = int(given["dim"]) % len(shape), given["index"]
            if isinstance(index, int) and isinstance(shape[dim], int):
                yield Slice(node, source, dim, index % shape[dim], None)
        elif node.target is aten.slice.Tensor:
            yield from _cut(node, source, shape)


def _parts(node: fx.Node, source: fx.Node) -> Iterator[Slice]:
    """Yield the items of a split; nothing if a width is a symbol."""
    dim = int(bound_arguments(node)["dim"]) % len(node.meta["val"][0].shape)
    starts, start = [], 0
    for part in node.meta["val"]:
        starts.append(start)
        width = known(part.shape[dim])
        if not isinstance(width, int):
            return
        start += width
    for user in node.users:
        if user.target is operator.getitem:
            index = int(user.args[1]) % len(starts)  # type: ignore[arg-type]
            width = known(node.meta["val"][index].shape[dim])
            yield Slice(user, source, dim, starts[index], width)


def _items(node: fx.Node, source: fx.Node, dim: int) -> Iterator[Slice]:
    count = len(node.meta["val"])
    for user in node.users:
        if user.target is operator.getitem:
            yield Slice(user, source, dim, int(user.args[1]) % count, None)  # type: ignore[arg-type]


def _cut(node: fx.Node, source: fx.Node, shape: tuple[Any, ...]) -> Iterator[Slice]:
    given = bound_arguments(node)
    dim = int(given["dim"]) % len(shape)
    start, end, extent = given["start"] or 0, given["end"], shape[dim]
    end = extent if end is None else end
    if given["step"] != 1 or not all(isinstance(x, int) for x in (start, end, extent)):
        return
    width = known(node.meta["val"].shape[dim])
    begin = min(start + extent if start < 0 else start, extent)
    if isinstance(width, int) and width:
        yield Slice(node, source, dim, begin, width)


def groups(slices: Sequence[Slice]) -> list[list[Slice]]:
    """Group slices by tensor, dimension and width; sort each group by start."""
    found: dict[object, list[Slice]] = {}
    for each in slices:
        found.setdefault((each.source, each.dim, each.width), []).append(each)
    return [sorted(group, key=lambda s: s.start) for group in found.values()]


def side_by_side(group: Sequence[Slice]) -> bool:
    """Whether the slices adjoin without gaps, so that a view covers all of them."""
    step = group[0].width or 1
    return all(s.start == group[0].start + i * step for i, s in enumerate(group))


def stacked(group: Sequence[Slice], emit: Emitter) -> tuple[fx.Node, int]:
    """Emit a view of adjoining slices; return it and its dimension that counts the slices."""
    first = group[0]
    step = first.width or 1
    length, node = step * len(group), first.source
    extent = (shape_of(node) or ())[first.dim]
    if extent != length:
        node = emit(aten.slice.Tensor, node, first.dim, first.start, first.start + length)
    if first.width is not None:
        node = emit(aten.unflatten.int, node, first.dim, [len(group), step])
    return node, first.dim
