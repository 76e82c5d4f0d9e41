"""Converters of norms.

The converters emit Relax's norm operators. Passes replace the operators by elementary ones if a
norm must be differentiated or has no schedule of its own. Relax's operators do not return the
statistics that PyTorch saves for backward. If a node reads them, the norm stays an ATen call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from tvm import relax

from tvmbridge.backends import backend_of
from tvmbridge.frontend.importer import Importer
from tvmbridge.frontend.registry import FLOATS, HALVES, Declined, converts
from tvmbridge.frontend.running_statistics import moved, moved_as_bfloat16
from tvmbridge.frontend.saved_statistics import Operand, check, wide, with_statistics
from tvmbridge.frontend.shapes import shape_of
from tvmbridge.kernels.dtypes import to_relax_dtype

aten = torch.ops.aten

_DTYPES = FLOATS | HALVES


def _narrow(ctx: Importer, value: relax.Expr, x: fx.Node) -> relax.Expr:
    """Cast a result from ``wide(x)`` to the dtype of ``x``."""
    return ctx.cast(value, wide(x), x.meta["val"].dtype)


def _parameter(
    ctx: Importer, parameter: Operand, shape: Sequence[int], fill: float, dtype: Any
) -> Any:
    """Return a weight or bias in ``dtype``; a tensor filled with ``fill`` if it is None."""
    if parameter is not None:
        return ctx.tensor(parameter, dtype)
    name = to_relax_dtype(dtype)
    return ctx.emit(relax.op.full(list(shape), relax.const(fill, name), name))


def _affine(
    ctx: Importer, weight: Operand, bias: Operand, shape: Sequence[int], dtype: torch.dtype
) -> tuple[relax.Expr, relax.Expr]:
    return (
        _parameter(ctx, weight, shape, 1.0, dtype),
        _parameter(ctx, bias, shape, 0.0, dtype),
    )


@converts(aten.native_layer_norm.default, dtypes=_DTYPES)
def _native_layer_norm(
    ctx: Importer,
    node: fx.Node,
    x: fx.Node,
    normalized_shape: Sequence[int],
    weight: Operand,
    bias: Operand,
    eps: float,
) -> tuple[Any, ...]:
    check(node, x, weight, bias, unread=())
    if any(user.args[1] for user in node.users):
        return with_statistics(ctx, node, x)
    gamma, beta = _affine(ctx, weight, bias, normalized_shape, x.meta["val"].dtype)
    rank = len(shape_of(x))
    axes = list(range(rank - len(normalized_shape), rank))
    normed = relax.op.nn.layer_norm(
        ctx.value(x), gamma, beta, axes, eps, center=bias is not None, scale=weight is not None
    )
    return ctx.emit(normed), None, None


@converts(aten.rms_norm.default, dtypes=_DTYPES)
def _rms_norm(
    ctx: Importer,
    node: fx.Node,
    x: fx.Node,
    normalized_shape: Sequence[int],
    weight: Operand = None,
    eps: float | None = None,
) -> relax.Expr:
    check(node, x, weight, unread=())
    dtype = x.meta["val"].dtype
    if eps is None:
        eps = torch.finfo(torch.float32 if dtype in HALVES else dtype).eps
    rank = len(shape_of(x))
    axes = list(range(rank - len(normalized_shape), rank))
    scale = _parameter(ctx, weight, normalized_shape, 1.0, dtype)
    return relax.op.nn.rms_norm(ctx.value(x), scale, axes, eps)


@converts(aten.native_group_norm.default, dtypes=_DTYPES)
def _native_group_norm(
    ctx: Importer,
    node: fx.Node,
    x: fx.Node,
    weight: Operand,
    bias: Operand,
    batch: int,
    channels: int,
    inner: int,
    groups: int,
    eps: float,
) -> tuple[Any, ...]:
    check(node, x, weight, bias, unread=(1, 2))
    return _by_channel(ctx, relax.op.nn.group_norm, x, weight, bias, eps, groups), None, None


@converts(aten._native_batch_norm_legit_no_training.default, dtypes=_DTYPES)
def _batch_norm_in_inference(
    ctx: Importer,
    node: fx.Node,
    x: fx.Node,
    weight: Operand,
    bias: Operand,
    mean: fx.Node,
    variance: fx.Node,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    check(node, x, weight, bias, mean, variance, unread=(1, 2))
    normed, _, _ = _batch_norm(ctx, x, weight, bias, eps, (mean, variance))
    return _narrow(ctx, normed, x), None, None


@converts(aten._native_batch_norm_legit.no_stats, dtypes=_DTYPES)
def _batch_norm_without_statistics(
    ctx: Importer,
    node: fx.Node,
    x: fx.Node,
    weight: Operand,
    bias: Operand,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    check(node, x, weight, bias, unread=(1, 2))
    if not training:
        raise Declined("batch norm without any statistics")
    if shape_of(x)[0] == 1 and len(shape_of(x)) > 2:
        # PyTorch computes an instance norm as the batch norm of one sample, whose channels are
        # all channels of all samples.
        return _by_channel(ctx, relax.op.nn.instance_norm, x, weight, bias, eps), None, None
    normed, _, _ = _batch_norm(ctx, x, weight, bias, eps, None)
    return _narrow(ctx, normed, x), None, None


@converts(aten._native_batch_norm_legit_functional.default, dtypes=_DTYPES)
def _batch_norm_in_training(
    ctx: Importer,
    node: fx.Node,
    x: fx.Node,
    weight: Operand,
    bias: Operand,
    mean: fx.Node,
    variance: fx.Node,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    check(node, x, weight, bias, mean, variance, unread=(1, 2))
    if not training:
        normed, _, _ = _batch_norm(ctx, x, weight, bias, eps, (mean, variance))
        return _narrow(ctx, normed, x), None, None, ctx.value(mean), ctx.value(variance)
    count = math.prod(shape_of(x)) // shape_of(x)[1]
    if count < 2:
        raise Declined("the unbiased variance of one value")
    y, batch_mean, biased = _batch_norm(ctx, x, weight, bias, eps, None)
    value = x.meta["val"]
    if value.dtype is torch.bfloat16 and backend_of(value.device).moves_in_bfloat16:
        return (
            _narrow(ctx, y, x),
            None,
            None,
            *moved_as_bfloat16(ctx, (mean, variance), (batch_mean, biased), count, momentum),
        )
    # Not multiplied by count / (count - 1): for a large count that factor is 1 in float32 and the
    # product would be removed, so that code for other sizes would differ in more than numbers.
    more = ctx.emit(relax.op.multiply(biased, ctx.tensor(1 / (count - 1), wide(x))))
    unbiased = ctx.emit(relax.op.add(biased, more))
    statistics = [
        _narrow(ctx, moved(ctx, ctx.tensor(old, wide(x)), new, momentum, wide(x)), x)
        for old, new in ((mean, batch_mean), (variance, unbiased))
    ]
    return _narrow(ctx, y, x), None, None, *statistics


@converts(aten._batch_norm_with_update_functional.default, dtypes=_DTYPES)
def _batch_norm_with_update(
    ctx: Importer,
    node: fx.Node,
    x: fx.Node,
    weight: Operand,
    bias: Operand,
    mean: fx.Node,
    variance: fx.Node,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    check(node, unread=(3,))
    y, *saved, new_mean, new_variance = _batch_norm_in_training(
        ctx, node, x, weight, bias, mean, variance, True, momentum, eps
    )
    return y, *saved, None, new_mean, new_variance


def _batch_norm(
    ctx: Importer,
    x: fx.Node,
    weight: Operand,
    bias: Operand,
    eps: float,
    statistics: tuple[fx.Node, fx.Node] | None,
) -> tuple[relax.Expr, relax.Expr, relax.Expr]:
    """Emit a batch norm by ``statistics``, or by the batch's own statistics if it is None.

    The operator gets a momentum of 1, so that it returns the batch's own statistics. The caller
    updates the running ones, because PyTorch uses the unbiased variance for that and Relax the
    biased one.

    Returns:
        The result, the mean and the biased variance, in the dtype ``wide(x)``.
    """
    dtype, channels = wide(x), [shape_of(x)[1]]
    gamma, beta = _affine(ctx, weight, bias, channels, dtype)
    given = statistics or (None, None)
    mean, variance = _affine(ctx, given[1], given[0], channels, dtype)[::-1]
    results = ctx.emit(
        relax.op.nn.batch_norm(
            ctx.tensor(x, dtype),
            gamma,
            beta,
            mean,
            variance,
            axis=1,
            epsilon=eps,
            center=bias is not None,
            scale=weight is not None,
            momentum=1.0,
            training=statistics is None,
        )
    )
    y, new_mean, new_variance = (ctx.emit(relax.TupleGetItem(results, i)) for i in range(3))
    return y, new_mean, new_variance


def _by_channel(
    ctx: Importer, norm: Any, x: fx.Node, weight: Operand, bias: Operand, eps: float, *groups: int
) -> relax.Expr:
    """Emit Relax's group norm or instance norm over all dimensions after the channels."""
    gamma, beta = _affine(ctx, weight, bias, [shape_of(x)[1]], wide(x))
    axes = list(range(2, len(shape_of(x))))
    named = {"center": bias is not None, "scale": weight is not None}
    operands = (ctx.tensor(x, wide(x)), gamma, beta, *groups, 1, axes, eps)
    return _narrow(ctx, ctx.emit(norm(*operands, **named)), x)
