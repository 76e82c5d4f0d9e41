"""Converters of look-ups and writes by index."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from tvmbridge.relay.registry import ALL, Refused, converts
from tvmbridge.relay.shapes import sliced
from tvmbridge.relay.writer import Operand, Writer, axis_of, dtype_of, shape_of

aten = torch.ops.aten


@converts(aten.embedding.default)
def _embedding(ctx: Writer, node: fx.Node, weight: fx.Node, index: fx.Node, *_: Any) -> str:
    return ctx.call("take", ctx.value(weight), ctx.value(index), axis=0, mode="clip")


@converts(aten.index_select.default)
def _index_select(ctx: Writer, node: fx.Node, x: fx.Node, dim: int, index: fx.Node) -> str:
    shape, text, places = shape_of(x), ctx.value(x), ctx.value(index)
    if not shape_of(index):
        places = ctx.reshape(places, [1])
    if not shape:
        return ctx.reshape(ctx.call("take", ctx.reshape(text, [1]), places, axis=0), [])
    return ctx.call("take", text, places, axis=axis_of(dim, len(shape)), mode="clip")


@converts(aten.gather.default)
def _gather(
    ctx: Writer,
    node: fx.Node,
    x: fx.Node,
    dim: int,
    index: fx.Node,
    *,
    sparse_grad: bool = False,
) -> str:
    shape, wanted, text = shape_of(x), shape_of(index), ctx.value(x)
    if not shape or not wanted:
        raise Refused("gather of a 0-d tensor")
    dim = axis_of(dim, len(shape))
    cuts = {d: (0, wanted[d], 1) for d in range(len(shape)) if d != dim}
    return ctx.call("gather", sliced(ctx, text, shape, cuts), ctx.value(index), axis=dim)


@converts(aten.diagonal.default, aten.unfold.default, aten.as_strided.default)
def _moved(ctx: Writer, node: fx.Node, x: fx.Node, *args: Any, **named: Any) -> str:
    """Write a view as a lookup of its elements; PyTorch computes their positions in ``x``."""
    shape, view = shape_of(x), cast("Callable[..., torch.Tensor]", node.target)
    count, fake = math.prod(shape), x.meta["val"]
    places = torch.empty_strided(shape, fake.stride(), dtype=torch.int64)
    if places.untyped_storage().nbytes() != count * 8 or fake.storage_offset():
        places = places.contiguous()
        if node.target is aten.as_strided.default:
            raise Refused("it reads beyond a view")
    places = view(places.copy_(torch.arange(count).reshape(shape)), *args, **named).contiguous()
    if places.shape == fake.shape and torch.equal(places.flatten(), torch.arange(count)):
        return ctx.value(x)
    flat = ctx.reshape(ctx.value(x), [count])
    return ctx.call("take", flat, ctx.constant(places), axis=0, mode="clip")


@converts(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(ctx: Writer, node: fx.Node, x: fx.Node, indices: Sequence[fx.Node | None]) -> str:
    shape, text = list(shape_of(x)), ctx.value(x)
    given = {d: i for d, i in enumerate(indices) if i is not None}
    if any(dtype_of(i) in (torch.bool, torch.uint8) for i in given.values()):
        raise Refused("an index that is a mask")
    dims = list(given)
    if dims != list(range(dims[0], dims[-1] + 1)):
        order = [*dims, *(d for d in range(len(shape)) if d not in given)]
        text, shape = ctx.transpose(text, order), [shape[d] for d in order]
        given = {d: given[o] for d, o in enumerate(dims)}
        dims = list(given)
    first, sizes = dims[0], [shape[d] for d in dims]
    places = _flat_index(ctx, list(given.values()), sizes)
    if len(dims) > 1:
        text = ctx.reshape(text, [*shape[:first], math.prod(sizes), *shape[dims[-1] + 1 :]])
    return ctx.call("take", text, places, axis=first, mode="clip")


@converts(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(
    ctx: Writer,
    node: fx.Node,
    x: fx.Node,
    indices: Sequence[fx.Node | None],
    values: fx.Node,
    accumulate: bool = False,
) -> str:
    """Write rows of ``x``, whose indexed dimensions are one dimension in front."""
    shape, dtype = shape_of(x), dtype_of(node)
    given = {d: i for d, i in enumerate(indices) if i is not None}
    if any(dtype_of(i) in (torch.bool, torch.uint8) for i in given.values()):
        raise Refused("an index that is a mask")
    if dtype is torch.bool and accumulate:
        raise Refused("a sum of booleans, which Relay computes modulo 2")
    dims, rest = list(given), [d for d in range(len(shape)) if d not in given]
    sizes, others = [shape[d] for d in dims], [shape[d] for d in rest]
    places = list(torch.broadcast_shapes(*(tuple(shape_of(i)) for i in given.values())))
    index = ctx.reshape(_flat_index(ctx, list(given.values()), sizes), [1, math.prod(places)])
    # The dimensions of the places stand where the indexed ones are, or in front.
    first = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    work = torch.int32 if dtype is torch.bool else dtype
    wanted = [*others[:first], *places, *others[first:]]
    rows = ctx.broadcast(ctx.operand(values, work), shape_of(values), wanted)
    end = first + len(places)
    rows = ctx.transpose(rows, [*range(first, end), *range(first), *range(end, len(wanted))])
    rows = ctx.reshape(rows, [math.prod(places), *others])
    order = [*dims, *rest]
    flat = ctx.reshape(ctx.transpose(ctx.operand(x, work), order), [math.prod(sizes), *others])
    mode = "add" if accumulate else "update"
    written = ctx.reshape(ctx.call("scatter_nd", flat, index, rows, mode=mode), [*sizes, *others])
    back = ctx.transpose(written, [order.index(d) for d in range(len(shape))])
    return ctx.cast(back, work, dtype)


def _flat_index(ctx: Writer, indices: Sequence[fx.Node], sizes: Sequence[int]) -> str:
    """Combine int64 indices into several dimensions to one; a negative one counts from the end."""
    known = [ctx.known.get(i) for i in indices]
    if all(isinstance(k, torch.Tensor) for k in known):
        total = torch.zeros((), dtype=torch.int64)
        for place, size in zip(known, sizes, strict=True):
            total = total * size + torch.where(place < 0, place + size, place)  # type: ignore[operator,arg-type]
        return ctx.constant(total)
    text = ""
    for index, size in zip(indices, sizes, strict=True):
        place = _from_the_front(ctx, ctx.operand(index, torch.int64), size)
        if text:
            text = ctx.call("multiply", text, ctx.number(size, torch.int64))
            text = ctx.call("add", text, place)
        else:
            text = place
    return text


def _from_the_front(ctx: Writer, index: str, size: int) -> str:
    negative = ctx.call("less", index, ctx.number(0, torch.int64))
    counted = ctx.call("add", index, ctx.number(size, torch.int64))
    return ctx.call("where", negative, counted, index)


@converts(aten.scatter.src, aten.scatter.value, aten.scatter_add.default, dtypes=ALL)
def _scatter(
    ctx: Writer, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, source: Operand
) -> str:
    shape, wanted, dtype = shape_of(x), shape_of(index), dtype_of(node)
    if not shape or not wanted:
        raise Refused("scatter into a 0-d tensor")
    if dtype is torch.bool and node.target is aten.scatter_add.default:
        raise Refused("a sum of booleans, which Relay computes modulo 2")
    if isinstance(source, fx.Node):
        cuts = {d: (0, n, 1) for d, n in enumerate(wanted)}
        updates = sliced(ctx, ctx.value(source), shape_of(source), cuts)
    else:
        updates = ctx.call("full", ctx.number(source, dtype), shape=wanted, dtype=dtype)
    operands = (ctx.value(x), ctx.value(index), updates)
    adds, axis = node.target is aten.scatter_add.default, axis_of(dim, len(shape))
    if ctx.version == "0.11":
        return ctx.call("scatter_add" if adds else "scatter", *operands, axis=axis)
    how = "add" if adds else "update"
    return ctx.call("scatter_elements", *operands, axis=axis, reduction=how)
