"""Converters of activation functions."""

from __future__ import annotations

import torch
from torch import fx

from tvmbridge.relay.registry import FLOATS, converts
from tvmbridge.relay.writer import Writer, dtype_of, shape_of

aten = torch.ops.aten


def _times(ctx: Writer, text: str, factor: float, dtype: torch.dtype) -> str:
    return ctx.call("multiply", text, ctx.number(factor, dtype))


def _plus(ctx: Writer, text: str, term: float, dtype: torch.dtype) -> str:
    return ctx.call("add", text, ctx.number(term, dtype))


@converts(aten.leaky_relu.default, dtypes=FLOATS)
def _leaky_relu(ctx: Writer, node: fx.Node, x: fx.Node, negative_slope: float = 0.01) -> str:
    return ctx.call("nn.leaky_relu", ctx.value(x), alpha=float(negative_slope))


@converts(aten.elu.default, dtypes=FLOATS)
def _elu(
    ctx: Writer,
    node: fx.Node,
    x: fx.Node,
    alpha: float = 1.0,
    scale: float = 1.0,
    input_scale: float = 1.0,
) -> str:
    dtype, value = dtype_of(node), ctx.value(x)
    below = ctx.call("exp", _times(ctx, value, input_scale, dtype))
    below = _times(ctx, _plus(ctx, below, -1.0, dtype), alpha * scale, dtype)
    above = value if scale == 1 else _times(ctx, value, scale, dtype)
    positive = ctx.call("greater", value, ctx.number(0, dtype))
    return ctx.call("where", positive, above, below)


@converts(aten.softplus.default, dtypes=FLOATS)
def _softplus(
    ctx: Writer, node: fx.Node, x: fx.Node, beta: float = 1.0, threshold: float = 20.0
) -> str:
    dtype, value = dtype_of(node), ctx.value(x)
    scaled = value if beta == 1 else _times(ctx, value, beta, dtype)
    curve = ctx.call("log", _plus(ctx, ctx.call("exp", scaled), 1.0, dtype))
    curve = curve if beta == 1 else _times(ctx, curve, 1 / beta, dtype)
    linear = ctx.call("greater", scaled, ctx.number(threshold, dtype))
    return ctx.call("where", linear, value, curve)


@converts(aten._softmax.default, aten._log_softmax.default, dtypes=FLOATS)
def _softmax(ctx: Writer, node: fx.Node, x: fx.Node, dim: int, half_to_float: bool) -> str:
    name = "nn.softmax" if node.target is aten._softmax.default else "nn.log_softmax"
    shape = shape_of(node)
    if not shape:
        return ctx.reshape(ctx.call(name, ctx.reshape(ctx.value(x), [1]), axis=0), [])
    last, dim = len(shape) - 1, dim % len(shape)
    if dim == last:
        return ctx.call(name, ctx.value(x), axis=dim)
    axes = [last if d == dim else dim if d == last else d for d in range(len(shape))]
    swapped = ctx.call(name, ctx.transpose(ctx.value(x), axes), axis=last)
    return ctx.transpose(swapped, axes)
