"""Converters of operators that move or copy elements, such as reshapes, slices and padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from tvm import relax

from tvmbridge.core.decisions import padding_varies
from tvmbridge.frontend.creation import filled
from tvmbridge.frontend.elementwise import result_dtype
from tvmbridge.frontend.importer import Importer
from tvmbridge.frontend.registry import COMPUTED, MOVED, Declined, converts

aten = torch.ops.aten


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the static shape of the result of ``node``."""
    return tuple(int(s) for s in node.meta["val"].shape)


@converts(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    dtypes=MOVED,
)
def _reshape(ctx: Importer, node: fx.Node, x: fx.Node, *_: Any) -> relax.Expr:
    if shape_of(node) == shape_of(x):
        return ctx.value(x)
    return relax.op.reshape(ctx.value(x), shape_of(node))


@converts(
    aten.clone.default,
    aten.alias.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
    dtypes=MOVED,
)
def _identity(ctx: Importer, node: fx.Node, x: fx.Node, **_: Any) -> relax.Expr:
    return ctx.value(x)


@converts(aten.detach.default, dtypes=MOVED)
def _detach(ctx: Importer, node: fx.Node, x: fx.Node) -> relax.Expr:
    if not result_dtype(node).is_floating_point:
        return ctx.value(x)
    return relax.op.grad.no_grad(ctx.value(x))


@converts(aten.permute.default, dtypes=MOVED)
def _permute(ctx: Importer, node: fx.Node, x: fx.Node, dims: Sequence[int]) -> relax.Expr:
    rank = len(shape_of(x))
    axes = [d % rank for d in dims]
    if axes == sorted(axes):
        return ctx.value(x)
    return relax.op.permute_dims(ctx.value(x), axes)


@converts(aten.transpose.int, dtypes=MOVED)
def _transpose(ctx: Importer, node: fx.Node, x: fx.Node, first: int, second: int) -> relax.Expr:
    rank = len(shape_of(x))
    if rank == 0:
        return ctx.value(x)
    axes = list(range(rank))
    axes[first], axes[second] = axes[second], axes[first]
    return _permute(ctx, node, x, axes)


@converts(aten.t.default, dtypes=MOVED)
def _t(ctx: Importer, node: fx.Node, x: fx.Node) -> relax.Expr:
    return _permute(ctx, node, x, list(range(len(shape_of(x))))[::-1])


@converts(aten.expand.default, dtypes=MOVED)
def _expand(ctx: Importer, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> relax.Expr:
    if shape_of(node) == shape_of(x):
        return ctx.value(x)
    return relax.op.broadcast_to(ctx.value(x), shape_of(node))


@converts(aten.cat.default, dtypes=MOVED)
def _cat(ctx: Importer, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> relax.Expr:
    dtype = result_dtype(node)
    rank = len(shape_of(node))
    if any(len(shape_of(t)) != rank for t in tensors):
        raise Declined("cat with a legacy one-dimensional empty tensor")
    return relax.op.concat([ctx.tensor(t, dtype) for t in tensors], dim % rank)


@converts(aten.stack.default, dtypes=MOVED)
def _stack(ctx: Importer, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> relax.Expr:
    dtype = result_dtype(node)
    rank = len(shape_of(node))
    dim %= rank
    widened = [*shape_of(node)[:dim], 1, *shape_of(node)[dim + 1 :]]
    parts = [ctx.emit(relax.op.reshape(ctx.tensor(t, dtype), widened)) for t in tensors]
    return relax.op.concat(parts, dim)


def _split_at(ctx: Importer, x: fx.Node, sizes: Sequence[int], dim: int) -> tuple[Any, ...]:
    if len(sizes) == 1:
        return (ctx.value(x),)
    front = shape_of(x)[:dim]
    if len(set(sizes)) > 1 and all(extent == 1 for extent in front):
        return tuple(
            ctx.emit(
                relax.op.strided_slice(ctx.value(x), [dim], [sum(sizes[:i])], [sum(sizes[: i + 1])])
            )
            for i in range(len(sizes))
        )
    cuts = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    pieces = ctx.emit(relax.op.split(ctx.value(x), cuts, dim))
    return tuple(ctx.emit(relax.TupleGetItem(pieces, i)) for i in range(len(sizes)))


@converts(aten.split_with_sizes.default, dtypes=MOVED)
def _split_with_sizes(
    ctx: Importer, node: fx.Node, x: fx.Node, sizes: Sequence[int], dim: int = 0
) -> tuple[Any, ...]:
    return _split_at(ctx, x, sizes, dim % len(shape_of(x)))


@converts(aten.split.Tensor, dtypes=MOVED)
def _split(ctx: Importer, node: fx.Node, x: fx.Node, size: int, dim: int = 0) -> tuple[Any, ...]:
    dim %= len(shape_of(x))
    sizes = [int(part.shape[dim]) for part in node.meta["val"]]
    return _split_at(ctx, x, sizes, dim)


@converts(aten.unbind.int, dtypes=MOVED)
def _unbind(ctx: Importer, node: fx.Node, x: fx.Node, dim: int = 0) -> tuple[Any, ...]:
    shape = shape_of(x)
    dim %= len(shape)
    rest = [*shape[:dim], *shape[dim + 1 :]]
    pieces = _split_at(ctx, x, [1] * shape[dim], dim)
    return tuple(ctx.emit(relax.op.reshape(p, rest)) for p in pieces)


@converts(aten.slice.Tensor, dtypes=MOVED)
def _slice(
    ctx: Importer,
    node: fx.Node,
    x: fx.Node,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> relax.Expr:
    shape = shape_of(x)
    dim %= len(shape)
    first, last, _ = slice(start, end, step).indices(shape[dim])
    if (first, last, step) == (0, shape[dim], 1):
        return ctx.value(x)
    return relax.op.strided_slice(ctx.value(x), [dim], [first], [last], [step])


@converts(aten.select.int, dtypes=MOVED)
def _select(ctx: Importer, node: fx.Node, x: fx.Node, dim: int, index: int) -> relax.Expr:
    shape = shape_of(x)
    dim %= len(shape)
    index %= shape[dim]
    row = ctx.emit(relax.op.strided_slice(ctx.value(x), [dim], [index], [index + 1]))
    return relax.op.reshape(row, shape_of(node))


@converts(aten.repeat.default, dtypes=MOVED)
def _repeat(ctx: Importer, node: fx.Node, x: fx.Node, repeats: Sequence[int]) -> relax.Expr:
    shape = [1] * (len(repeats) - len(shape_of(x))) + list(shape_of(x))
    if all(size == 1 or times == 1 for size, times in zip(shape, repeats, strict=True)):
        # TVM's tile and reshape take remainders of places, and fold them with the offsets of a
        # concatenation: these numbers are no functions of sizes that symbolic code knows.
        return relax.op.broadcast_to(ctx.value(_behind_leading_ones(x)), shape_of(node))
    return relax.op.tile(ctx.value(x), list(repeats))


def _behind_leading_ones(x: fx.Node) -> fx.Node:
    """The tensor that a view has put dimensions of size 1 in front of, or ``x`` itself."""
    if x.target not in (aten.view.default, aten.reshape.default, aten.unsqueeze.default):
        return x
    source = x.args[0]
    assert isinstance(source, fx.Node)
    shape, inner = tuple(shape_of(x)), tuple(shape_of(source))
    in_front = len(shape) - len(inner)
    return source if in_front > 0 and shape == (1,) * in_front + inner else x


@converts(aten.flip.default, dtypes=MOVED)
def _flip(ctx: Importer, node: fx.Node, x: fx.Node, dims: Sequence[int]) -> relax.Expr:
    value, rank = ctx.value(x), len(shape_of(x))
    for dim in dims if rank else ():
        value = ctx.emit(relax.op.flip(value, dim % rank))
    return value


@converts(aten.tril.default, aten.triu.default, dtypes=COMPUTED)
def _triangle(ctx: Importer, node: fx.Node, x: fx.Node, diagonal: int = 0) -> relax.Expr:
    op = relax.op.tril if node.target is aten.tril.default else relax.op.triu
    return op(ctx.value(x), diagonal)


@converts(aten.constant_pad_nd.default, dtypes=COMPUTED)
def _pad(
    ctx: Importer, node: fx.Node, x: fx.Node, pad: Sequence[int], value: int | float | bool = 0
) -> relax.Expr:
    """Concatenate edges filled with ``value``; a negative padding slices instead."""
    if padding_varies() and pad:
        return ctx.compiled_call(node)
    dtype, shape = result_dtype(node), list(shape_of(x))
    result = ctx.value(x)
    for position in range(len(pad) // 2):
        axis = len(shape) - 1 - position
        before, after = pad[2 * position], pad[2 * position + 1]
        begin, end = max(0, -before), shape[axis] - max(0, -after)
        if (begin, end) != (0, shape[axis]):
            result = ctx.emit(relax.op.strided_slice(result, [axis], [begin], [end]))
        parts = [result]
        shape[axis] = end - begin
        for edge, first in ((before, True), (after, False)):
            if edge > 0:
                extents = [*shape[:axis], edge, *shape[axis + 1 :]]
                fill = ctx.emit(filled(extents, value, dtype))
                parts.insert(0 if first else len(parts), fill)
        if len(parts) > 1:
            result = ctx.emit(relax.op.concat(parts, axis))
        shape[axis] += max(0, before) + max(0, after)
    return result
