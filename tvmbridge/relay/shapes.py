"""Converters of operators that move elements: views, slices, joins, padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tvmbridge.relay.registry import ALL, COMPLEX, FLOATS, Refused, converts
from tvmbridge.relay.writer import Operand, Writer, axis_of, dtype_of, shape_of

aten = torch.ops.aten


@converts(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.flatten.using_ints,
)
def _reshape(ctx: Writer, node: fx.Node, x: fx.Node, *_: Any, **named: Any) -> str:
    if shape_of(x) == shape_of(node):
        return ctx.value(x)
    return ctx.reshape(ctx.value(x), shape_of(node))


@converts(aten.view_as_real.default, aten.view_as_complex.default, dtypes=FLOATS | COMPLEX)
def _pairs(ctx: Writer, node: fx.Node, x: fx.Node) -> str:
    """Return ``x``: a complex tensor is one of pairs in the text."""
    if x in ctx.weights and x.meta["val"].is_complex():
        name, tensor = ctx.weights[x]
        return ctx.weight(name, torch.view_as_real(tensor))
    return ctx.value(x)


@converts(aten.permute.default)
def _permute(ctx: Writer, node: fx.Node, x: fx.Node, dims: Sequence[int]) -> str:
    rank = len(shape_of(x))
    return ctx.transpose(ctx.value(x), [axis_of(d, rank) for d in dims])


@converts(aten.transpose.int)
def _transpose(ctx: Writer, node: fx.Node, x: fx.Node, dim0: int, dim1: int) -> str:
    axes = list(range(len(shape_of(x))))
    if axes:
        axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
    return ctx.transpose(ctx.value(x), axes)


@converts(aten.t.default)
def _t(ctx: Writer, node: fx.Node, x: fx.Node) -> str:
    return ctx.transpose(ctx.value(x), list(reversed(range(len(shape_of(x))))))


@converts(aten.expand.default)
def _expand(ctx: Writer, node: fx.Node, x: fx.Node, *_: Any, **named: Any) -> str:
    return ctx.broadcast(ctx.value(x), shape_of(x), shape_of(node))


@converts(aten.repeat.default)
def _repeat(ctx: Writer, node: fx.Node, x: fx.Node, repeats: Sequence[int]) -> str:
    if not repeats:
        return ctx.value(x)
    value, shape = ctx.value(x), shape_of(x)
    if len(repeats) > len(shape):
        value = ctx.reshape(value, [*[1] * (len(repeats) - len(shape)), *shape])
    return ctx.call("tile", value, reps=list(repeats))


@converts(aten.slice.Tensor)
def _slice(
    ctx: Writer,
    node: fx.Node,
    x: fx.Node,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> str:
    shape = shape_of(x)
    dim = axis_of(dim, len(shape))
    first, last, _ = slice(start, end).indices(shape[dim])
    return sliced(ctx, ctx.value(x), shape, {dim: (first, last, step)})


def sliced(
    ctx: Writer, text: str, shape: Sequence[int], places: dict[int, tuple[int, int, int]]
) -> str:
    """Return a slice of ``text``: begin, end and stride for some of its dimensions."""
    kept = {d: p for d, p in places.items() if p != (0, shape[d], 1)}
    if not kept:
        return text
    begin, end, strides = zip(*kept.values(), strict=True)
    return ctx.call("strided_slice", text, begin=begin, end=end, strides=strides, axes=list(kept))


@converts(aten.select.int)
def _select(ctx: Writer, node: fx.Node, x: fx.Node, dim: int, index: int) -> str:
    shape = shape_of(x)
    dim = axis_of(dim, len(shape))
    index %= shape[dim]
    piece = sliced(ctx, ctx.value(x), shape, {dim: (index, index + 1, 1)})
    return ctx.call("squeeze", piece, axis=[dim])


@converts(aten.slice_scatter.default)
def _slice_scatter(
    ctx: Writer,
    node: fx.Node,
    x: fx.Node,
    source: fx.Node,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> str:
    shape, text = shape_of(x), ctx.value(x)
    dim = axis_of(dim, len(shape))
    first, last, _ = slice(start, end).indices(shape[dim])
    if step != 1:
        raise Refused("a slice with a step that is written")
    wide = ctx.operand(source, dtype_of(node))
    size = shape[dim]
    edges = ((0, first), (last, size))
    ends = [sliced(ctx, text, shape, {dim: (a, b, 1)}) if a < b else None for a, b in edges]
    parts = [part for part in (ends[0], wide, ends[1]) if part is not None]
    return ctx.call("concatenate", ctx.pack(parts), axis=dim) if len(parts) > 1 else wide


@converts(aten.copy.default)
def _copy(ctx: Writer, node: fx.Node, x: fx.Node, source: fx.Node, *_: Any) -> str:
    text = ctx.operand(source, dtype_of(node))
    return ctx.broadcast(text, shape_of(source), shape_of(node))


@converts(aten.unbind.int)
def _unbind(ctx: Writer, node: fx.Node, x: fx.Node, dim: int = 0) -> tuple[str, ...]:
    shape = shape_of(x)
    dim = axis_of(dim, len(shape))
    pieces = _split(ctx, ctx.value(x), [1] * shape[dim], dim)
    return tuple(ctx.call("squeeze", piece, axis=[dim]) for piece in pieces)


@converts(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
def _split_node(ctx: Writer, node: fx.Node, x: fx.Node, size: Any, dim: int = 0) -> tuple[str, ...]:
    dim = axis_of(dim, len(shape_of(x)))
    sizes = [int(part.shape[dim]) for part in node.meta["val"]]
    return _split(ctx, ctx.value(x), sizes, dim)


def _split(ctx: Writer, text: str, sizes: Sequence[int], dim: int) -> tuple[str, ...]:
    if len(sizes) == 1:
        return (text,)
    if 0 in sizes:
        raise Refused("an empty part of a split")
    places = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    parts = ctx.call("split", text, indices_or_sections=places, axis=dim)
    return tuple(f"{parts}.{i}" for i in range(len(sizes)))


@converts(aten.cat.default)
def _cat(ctx: Writer, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> str:
    # Empty tensors of one dimension are ignored by PyTorch.
    parts = [t for t in tensors if t.meta["val"].numel()]
    dtype = dtype_of(node)
    if len(parts) == 1:
        return ctx.operand(parts[0], dtype)
    operands = ctx.pack([ctx.operand(t, dtype) for t in parts])
    return ctx.call("concatenate", operands, axis=axis_of(dim, len(shape_of(node))))


@converts(aten.stack.default)
def _stack(ctx: Writer, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> str:
    dtype = dtype_of(node)
    operands = ctx.pack([ctx.operand(t, dtype) for t in tensors])
    return ctx.call("stack", operands, axis=axis_of(dim, len(shape_of(node))))


@converts(aten.flip.default)
def _flip(ctx: Writer, node: fx.Node, x: fx.Node, dims: Sequence[int]) -> str:
    value, rank = ctx.value(x), len(shape_of(x))
    if not rank:
        return value
    for dim in dims:
        value = ctx.call("reverse", value, axis=axis_of(dim, rank))
    return value


@converts(aten.constant_pad_nd.default, dtypes=ALL - {torch.bool})
def _pad(ctx: Writer, node: fx.Node, x: fx.Node, pad: Sequence[int], value: float = 0) -> str:
    shape, dtype, text = shape_of(x), dtype_of(node), ctx.value(x)
    pairs = [(int(pad[i]), int(pad[i + 1])) for i in range(0, len(pad), 2)]
    widths = [(0, 0)] * (len(shape) - len(pairs)) + pairs[::-1]
    cuts = {
        d: (max(-left, 0), shape[d] - max(-right, 0), 1)
        for d, (left, right) in enumerate(widths)
        if left < 0 or right < 0
    }
    text = sliced(ctx, text, shape, cuts)
    grown = [[max(left, 0), max(right, 0)] for left, right in widths]
    if not any(map(any, grown)):
        return text
    return ctx.call("nn.pad", text, ctx.number(value, dtype), pad_width=grown, pad_mode="constant")


@converts(
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.new_full.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.fill.Scalar,
)
def _filled(ctx: Writer, node: fx.Node, x: fx.Node, *args: Any, **named: Any) -> str:
    name = str(node.target)
    fill: Operand = 0 if "zeros" in name else 1
    if "full" in name or "fill" in name:
        fill = named.get("fill_value", args[-1] if args else 0)
    if not isinstance(fill, int | float):
        raise Refused(f"a fill value of type {type(fill).__name__}")
    return ctx.call(
        "full", ctx.number(fill, dtype_of(node)), shape=shape_of(node), dtype=dtype_of(node)
    )
