"""The converter of scaled dot-product attention, which Relay has no operator for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from tvmbridge.relay.linear import batch_matmul
from tvmbridge.relay.registry import FLOATS, Refused, converts
from tvmbridge.relay.writer import Writer, dtype_of, shape_of

aten = torch.ops.aten


@converts(aten.scaled_dot_product_attention.default, dtypes=FLOATS | {torch.bool})
def _attention(
    ctx: Writer,
    node: fx.Node,
    query: fx.Node,
    key: fx.Node,
    value: fx.Node,
    attn_mask: fx.Node | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str:
    if dropout_p:
        raise Refused("attention with dropout")
    dtype, (rows, width), columns = dtype_of(node), shape_of(query)[-2:], shape_of(key)[-2]
    batch = _batch(query, key, value, enable_gqa)
    q, k, v = (_heads(ctx, n, batch, enable_gqa) for n in (query, key, value))
    factor = 1 / math.sqrt(width) if scale is None else scale
    scores = batch_matmul(ctx, q, k, transpose_b=True)
    scores = ctx.call("multiply", scores, ctx.number(factor, dtype))
    scores = ctx.reshape(scores, [*batch, rows, columns])
    if is_causal:
        lower = torch.ones(rows, columns, dtype=torch.bool).tril()
        scores = _masked(ctx, scores, ctx.constant(lower), dtype)
    if attn_mask is not None:
        mask, kind = ctx.value(attn_mask), dtype_of(attn_mask)
        if kind is torch.bool:
            scores = _masked(ctx, scores, mask, dtype)
        else:
            scores = ctx.call("add", scores, ctx.cast(mask, kind, dtype))
    weights = ctx.call("nn.softmax", scores, axis=len(batch) + 1)
    if attn_mask is not None:
        weights = _without_empty_rows(ctx, scores, weights, dtype)
    weights = ctx.reshape(weights, [math.prod(batch), rows, columns])
    return ctx.reshape(batch_matmul(ctx, weights, v), shape_of(node))


def _batch(query: fx.Node, key: fx.Node, value: fx.Node, grouped: bool) -> list[int]:
    """Return the broadcast batch dimensions of all three operands."""
    if grouped:
        return list(shape_of(query)[:-2])
    return list(torch.broadcast_shapes(*(shape_of(n)[:-2] for n in (query, key, value))))


def _heads(ctx: Writer, node: fx.Node, batch: Sequence[int], grouped: bool) -> str:
    """Return an operand as a batch of matrices."""
    text, shape = ctx.value(node), list(shape_of(node))
    if grouped and shape[-3] != batch[-1]:
        times = batch[-1] // shape[-3]
        text = ctx.call("repeat", text, repeats=times, axis=len(shape) - 3)
        shape[-3] = batch[-1]
    text = ctx.broadcast(text, shape, [*batch, *shape[-2:]])
    return ctx.reshape(text, [math.prod(batch), *shape[-2:]])


def _masked(ctx: Writer, scores: str, mask: str, dtype: torch.dtype) -> str:
    return ctx.call("where", mask, scores, ctx.number(-math.inf, dtype))


def _without_empty_rows(ctx: Writer, scores: str, weights: str, dtype: torch.dtype) -> str:
    """Return weights that are 0 in rows without an unmasked score, where softmax gives NaN."""
    most = ctx.call("max", scores, axis=[-1], keepdims=True)
    empty = ctx.call("equal", most, ctx.number(-math.inf, dtype))
    return ctx.call("where", empty, ctx.number(0, dtype), weights)
