"""Converters of neural-network operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from tvm import relax

from tvmbridge.frontend.importer import Importer
from tvmbridge.frontend.registry import COMPUTED, FLOATS, Declined, converts
from tvmbridge.frontend.shapes import shape_of
from tvmbridge.kernels.dtypes import to_relax_dtype
from tvmbridge.noise import dropout_arguments

aten = torch.ops.aten


@converts(aten.dropout.default, dtypes=FLOATS)
def _inactive_dropout(ctx: Importer, node: fx.Node, *_: Any) -> relax.Expr:
    x, p, train = dropout_arguments(node)
    if train and p != 0:
        raise Declined("dropout of everything")
    return ctx.value(x)


@converts(aten.native_layer_norm.default, dtypes=FLOATS)
def _native_layer_norm(
    ctx: Importer,
    node: fx.Node,
    x: fx.Node,
    normalized_shape: Sequence[int],
    weight: fx.Node | None,
    bias: fx.Node | None,
    eps: float,
) -> tuple[Any, ...]:
    rank, count = len(shape_of(x)), len(normalized_shape)
    if any(user.args[1] != 0 for user in node.users):
        raise Declined("layer norm whose statistics are read")
    dtype = to_relax_dtype(x.meta["val"].dtype)
    gamma, beta = (
        relax.op.full(list(normalized_shape), relax.const(fill, dtype), dtype)
        if parameter is None
        else ctx.value(parameter)
        for parameter, fill in ((weight, 1.0), (bias, 0.0))
    )
    gamma, beta = (ctx.emit(g) if not isinstance(g, relax.Var) else g for g in (gamma, beta))
    axes = list(range(rank - count, rank))
    normed = relax.op.nn.layer_norm(ctx.value(x), gamma, beta, axes, eps)
    return ctx.emit(normed), None, None


@converts(aten.embedding.default, dtypes=COMPUTED)
def _embedding(
    ctx: Importer,
    node: fx.Node,
    weight: fx.Node,
    indices: fx.Node,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> relax.Expr:
    if scale_grad_by_freq or sparse:
        raise Declined("embedding with a scaled or sparse gradient")
    flat = ctx.emit(relax.op.reshape(ctx.value(indices), (-1,)))
    rows = ctx.emit(relax.op.take(ctx.value(weight), flat, axis=0))
    if padding_idx >= 0:
        rows = _stop_padding_gradient(ctx, rows, flat, padding_idx, indices.meta["val"].dtype)
    return relax.op.reshape(rows, shape_of(node))


def _stop_padding_gradient(
    ctx: Importer, rows: relax.Expr, flat: relax.Expr, padding_idx: int, dtype: torch.dtype
) -> relax.Expr:
    """``rows`` unchanged, but no gradient reaches the row of the padding index."""
    padding = ctx.emit(
        relax.op.equal(
            ctx.emit(relax.op.expand_dims(flat, 1)),
            relax.const(padding_idx, to_relax_dtype(dtype)),
        )
    )
    stopped = ctx.emit(relax.op.grad.no_grad(rows))
    return ctx.emit(relax.op.where(padding, stopped, rows))


def _per_channel(
    ctx: Importer, x: relax.Expr, op: Callable[..., relax.Expr], row: relax.Expr, rank: int
) -> relax.Expr:
    """``op`` of ``x`` and a value for each channel, which is the second dimension of ``x``."""
    channels = int(row.ty.shape.values[0])
    shaped = ctx.emit(relax.op.reshape(row, [channels, *[1] * (rank - 2)]))
    return ctx.emit(op(x, shaped))


@converts(aten.native_group_norm.default, dtypes=FLOATS)
def _native_group_norm(
    ctx: Importer,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    batch: int,
    channels: int,
    inner: int,
    groups: int,
    eps: float,
) -> tuple[Any, ...]:
    if any(user.args[1] != 0 for user in node.users):
        raise Declined("group norm whose statistics are read")
    shape, dtype = shape_of(x), x.meta["val"].dtype
    rows = ctx.emit(relax.op.reshape(ctx.value(x), (batch * groups, channels // groups * inner)))
    centered = ctx.emit(relax.op.subtract(rows, ctx.emit(relax.op.mean(rows, [1], True))))
    square = ctx.emit(relax.op.multiply(centered, centered))
    variance = ctx.emit(relax.op.mean(square, [1], True))
    spread = ctx.emit(relax.op.rsqrt(ctx.emit(relax.op.add(variance, ctx.tensor(eps, dtype)))))
    normed = ctx.emit(relax.op.multiply(centered, spread))
    result = ctx.emit(relax.op.reshape(normed, shape))
    for parameter, op in ((weight, relax.op.multiply), (bias, relax.op.add)):
        if parameter is not None:
            result = _per_channel(ctx, result, op, ctx.value(parameter), len(shape))
    return result, None, None


@converts(aten._native_batch_norm_legit_no_training.default, dtypes=FLOATS)
def _batch_norm_in_inference(
    ctx: Importer,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    mean: fx.Node,
    variance: fx.Node,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    """x scale + shift, with scale = weight / sqrt(variance + eps), shift = bias - mean scale."""
    if any(user.args[1] != 0 for user in node.users):
        raise Declined("batch norm whose statistics are read")
    rank, dtype = len(shape_of(x)), x.meta["val"].dtype
    padded = ctx.emit(relax.op.add(ctx.value(variance), ctx.tensor(eps, dtype)))
    scale = ctx.emit(relax.op.rsqrt(padded))
    if weight is not None:
        scale = ctx.emit(relax.op.multiply(scale, ctx.value(weight)))
    moved = ctx.emit(relax.op.multiply(ctx.value(mean), scale))
    shift = ctx.emit(
        relax.op.negative(moved) if bias is None else relax.op.subtract(ctx.value(bias), moved)
    )
    scaled = _per_channel(ctx, ctx.value(x), relax.op.multiply, scale, rank)
    return _per_channel(ctx, scaled, relax.op.add, shift, rank), None, None
