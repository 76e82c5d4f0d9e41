"""Converters of normalisations."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
