"""Converters of normalisations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tvmbridge.relay.registry import FLOATS, Refused, converts
from tvmbridge.relay.writer import Writer, dtype_of, shape_of

aten = torch.ops.aten


def _affine(ctx: Writer, node: fx.Node | None, fill: float, size: int, dtype: torch.dtype) -> str:
    """Return a weight or a bias; constants if the module has none."""
    if node is not None:
        return ctx.value(node)
    return ctx.constant(torch.full((size,), fill, dtype=dtype))


@converts(aten._native_batch_norm_legit_no_training.default, dtypes=FLOATS)
def _batch_norm(
    ctx: Writer,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    mean: fx.Node,
    variance: fx.Node,
    momentum: float,
    eps: float,
) -> tuple[str, None, None]:
    channels, dtype = shape_of(x)[1], dtype_of(x)
    gamma = _affine(ctx, weight, 1.0, channels, dtype)
    beta = _affine(ctx, bias, 0.0, channels, dtype)
    operands = (ctx.value(x), gamma, beta, ctx.value(mean), ctx.value(variance))
    result = ctx.call("nn.batch_norm", *operands, axis=1, epsilon=float(eps))
    return f"{result}.0", None, None


@converts(aten.native_layer_norm.default, dtypes=FLOATS)
def _layer_norm(
    ctx: Writer,
    node: fx.Node,
    x: fx.Node,
    normalized_shape: Sequence[int],
    weight: fx.Node | None,
    bias: fx.Node | None,
    eps: float,
) -> tuple[str, None, None]:
    shape, size, dtype = shape_of(x), math.prod(normalized_shape), dtype_of(x)
    gamma = _affine(ctx, weight, 1.0, size, dtype)
    beta = _affine(ctx, bias, 0.0, size, dtype)
    text, rank = ctx.value(x), len(normalized_shape)
    if rank > 1:
        text = ctx.reshape(text, [*shape[:-rank], size])
        gamma = gamma if weight is None else ctx.reshape(gamma, [size])
        beta = beta if bias is None else ctx.reshape(beta, [size])
    text = ctx.call("nn.layer_norm", text, gamma, beta, axis=len(shape) - rank, epsilon=float(eps))
    return (ctx.reshape(text, shape) if rank > 1 else text), None, None


@converts(aten.native_group_norm.default, dtypes=FLOATS)
def _group_norm(
    ctx: Writer,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    batch: int,
    channels: int,
    elements: int,
    groups: int,
    eps: float,
) -> tuple[str, None, None]:
    dtype, shape = dtype_of(x), shape_of(x)
    gamma = _affine(ctx, weight, 1.0, channels, dtype)
    beta = _affine(ctx, bias, 0.0, channels, dtype)
    if math.prod(shape[2:]) * channels == groups:
        raise Refused("groups of one element")
    text = ctx.call(
        "nn.group_norm", ctx.value(x), gamma, beta, num_groups=groups, axis=1, epsilon=float(eps)
    )
    return text, None, None


@converts(aten._native_batch_norm_legit.no_stats, dtypes=FLOATS)
def _norm_of_batch(
    ctx: Writer,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[str, None, None]:
    """Write a batch norm with the statistics of the batch itself, as in an instance norm."""
    shape, dtype = shape_of(x), dtype_of(x)
    axes = [d for d in range(len(shape)) if d != 1]
    text = standardized(ctx, ctx.value(x), axes, eps, dtype)
    wide = [1, shape[1], *[1] * (len(shape) - 2)]
    if weight is not None:
        text = ctx.call("multiply", text, ctx.reshape(ctx.value(weight), wide))
    if bias is not None:
        text = ctx.call("add", text, ctx.reshape(ctx.value(bias), wide))
    return text, None, None


def standardized(
    ctx: Writer, text: str, axes: Sequence[int], eps: float, dtype: torch.dtype
) -> str:
    """Return (x - mean) / sqrt(variance + eps) over some dimensions."""
    mean = ctx.call("mean", text, axis=list(axes), keepdims=True)
    centred = ctx.call("subtract", text, mean)
    squares = ctx.call("multiply", centred, centred)
    variance = ctx.call("mean", squares, axis=list(axes), keepdims=True)
    root = ctx.call("sqrt", ctx.call("add", variance, ctx.number(eps, dtype)))
    return ctx.call("divide", centred, root)


@converts(aten.rms_norm.default, dtypes=FLOATS)
def _rms_norm(
    ctx: Writer,
    node: fx.Node,
    x: fx.Node,
    normalized_shape: Sequence[int],
    weight: fx.Node | None = None,
    eps: float | None = None,
) -> str:
    dtype, rank, text = dtype_of(node), len(shape_of(x)), ctx.value(x)
    axes = list(range(rank - len(normalized_shape), rank))
    squares = ctx.call("mean", ctx.call("multiply", text, text), axis=axes, keepdims=True)
    small = torch.finfo(dtype).eps if eps is None else eps
    root = ctx.call("sqrt", ctx.call("add", squares, ctx.number(small, dtype)))
    text = ctx.call("divide", text, root)
    return text if weight is None else ctx.call("multiply", text, ctx.value(weight))


@converts(aten.linalg_vector_norm.default, dtypes=FLOATS)
def _vector_norm(
    ctx: Writer,
    node: fx.Node,
    x: fx.Node,
    order: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> str:
    rank, text = len(shape_of(x)), ctx.operand(x, dtype_of(node))
    if not rank:
        raise Refused("the norm of a 0-d tensor")
    named: dict[str, Any] = {"keepdims": keepdim}
    named["axis"] = sorted(d % rank for d in dim) if dim else list(range(rank))
    if order == 2:
        return ctx.call("sqrt", ctx.call("sum", ctx.call("multiply", text, text), **named))
    names = {1.0: "sum", math.inf: "max", -math.inf: "min"}
    if order not in names:
        raise Refused(f"the norm of order {order}")
    return ctx.call(names[order], ctx.call("abs", text), **named)
