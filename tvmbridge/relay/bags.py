"""The converter of embedding bags, which Relay has no operator for."""

from __future__ import annotations

import math

import torch
from torch import fx

from tvmbridge.relay.registry import ALL, converts
from tvmbridge.relay.shapes import sliced
from tvmbridge.relay.writer import Writer, dtype_of, shape_of

aten = torch.ops.aten

_SUM, _MEAN, _MAX = 0, 1, 2


@converts(aten._embedding_bag.default, aten._embedding_bag_forward_only.default, dtypes=ALL)
def _embedding_bag(
    ctx: Writer,
    node: fx.Node,
    weight: fx.Node,
    indices: fx.Node,
    offsets: fx.Node,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: fx.Node | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[str | None, ...]:
    """Write the bags as a product: a matrix of rows' shares in bags, times the rows looked up."""
    dtype, count = dtype_of(weight), shape_of(indices)[0]
    places = ctx.operand(indices, torch.int64)
    rows = ctx.call("take", ctx.value(weight), places, axis=0, mode="clip")
    starts = shape_of(offsets)[0]
    bags = starts - 1 if include_last_offset else starts
    inside = _membership(ctx, ctx.operand(offsets, torch.int64), starts, bags, count)
    if padding_idx >= 0:
        kept = ctx.call("not_equal", places, ctx.number(padding_idx, torch.int64))
        inside = ctx.call("logical_and", inside, ctx.reshape(kept, [1, count]))
    if mode == _MAX:
        return _greatest(ctx, rows, inside, (bags, count, shape_of(weight)[1]), dtype), *[None] * 3
    shares = ctx.cast(inside, torch.bool, dtype)
    if mode == _MEAN:
        sizes = ctx.call("sum", shares, axis=[1], keepdims=True)
        sizes = ctx.call("maximum", sizes, ctx.number(1, dtype))
        shares = ctx.call("divide", shares, sizes)
    if per_sample_weights is not None:
        factors = ctx.reshape(ctx.value(per_sample_weights), [1, count])
        shares = ctx.call("multiply", shares, factors)
    columns = ctx.transpose(rows, [1, 0])
    result = ctx.call("nn.dense", shares, columns, units=shape_of(weight)[1])
    return result, None, None, None


def _greatest(
    ctx: Writer, rows: str, inside: str, sizes: tuple[int, int, int], dtype: torch.dtype
) -> str:
    """Return the greatest elements of bags, and 0 for empty bags."""
    bags, count, width = sizes
    chosen = ctx.reshape(inside, [bags, count, 1])
    lowest = ctx.number(-math.inf, dtype)
    wide = ctx.call("where", chosen, ctx.reshape(rows, [1, count, width]), lowest)
    most = ctx.call("max", wide, axis=[1], keepdims=False)
    some = ctx.call("any", inside, axis=[1], keepdims=True)
    return ctx.call("where", some, most, ctx.number(0, dtype))


def _membership(ctx: Writer, offsets: str, starts: int, bags: int, count: int) -> str:
    """Return which of ``count`` indices are in which bag."""
    positions = ctx.constant(torch.arange(count).reshape(1, count))
    whole = ctx.reshape(offsets, [starts, 1])
    begins = whole if bags == starts else _rows(ctx, whole, starts, 0, bags)
    since = ctx.call("greater_equal", positions, begins)
    if bags == starts:
        end = ctx.constant(torch.full((1, 1), count))
        ends = end
        if starts > 1:
            ends = ctx.call(
                "concatenate", ctx.pack([_rows(ctx, whole, starts, 1, starts), end]), axis=0
            )
    else:
        ends = _rows(ctx, whole, starts, 1, starts)
    return ctx.call("logical_and", since, ctx.call("less", positions, ends))


def _rows(ctx: Writer, text: str, size: int, begin: int, end: int) -> str:
    return sliced(ctx, text, (size, 1), {0: (begin, end, 1)})
