"""Converters of norms.

They emit Relax's whole norms, which passes spell out where they must be differentiated or have no
schedule of their own. Statistics that a norm saves for its backward are not among them: such a
norm is declined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from tvm import relax

from tvmbridge.frontend.importer import Importer
from tvmbridge.frontend.registry import FLOATS, HALVES, Declined, converts
from tvmbridge.frontend.running_statistics import moved, moved_as_bfloat16
from tvmbridge.frontend.shapes import shape_of
from tvmbridge.kernels.dtypes import to_relax_dtype

aten = torch.ops.aten

_DTYPES = FLOATS | HALVES

# On the CPU PyTorch's own kernels are as fast.
_COMPILED_WITH_STATISTICS = {"cuda"}
# The operands of backward that are statistics.
_STATISTICS: dict[Any, slice] = {
    aten.native_layer_norm_backward.default: slice(3, 5),
    aten._fused_rms_norm_backward.default: slice(3, 4),
}

Operand = fx.Node | None


def _check(node: fx.Node, *operands: Operand, unread: Sequence[int]) -> None:
    """Decline mixed dtypes, and results that are saved for a backward and read after all."""
    dtypes = {n.meta["val"].dtype for n in operands if n is not None}
    if len(dtypes) > 1:
        raise Declined("a norm of several dtypes")
    if unread and any(user.args[1] in unread for user in node.users):
        raise Declined("a norm whose saved statistics are read")


def _wide(x: fx.Node) -> torch.dtype:
    """The dtype that a norm is computed in: some of Relax's norms have no half precision."""
    dtype: torch.dtype = x.meta["val"].dtype
    return torch.float32 if dtype in HALVES else dtype


def _narrow(ctx: Importer, value: relax.Expr, x: fx.Node) -> relax.Expr:
    """A result computed in ``_wide(x)`` in the dtype of ``x``."""
    return ctx.cast(value, _wide(x), x.meta["val"].dtype)


def _parameter(
    ctx: Importer, parameter: Operand, shape: Sequence[int], fill: float, dtype: Any
) -> Any:
    """A weight or bias in ``dtype``, or what stands for one that is missing."""
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
    _check(node, x, weight, bias, unread=())
    if any(user.args[1] for user in node.users):
        return _with_statistics(ctx, node, x)
    gamma, beta = _affine(ctx, weight, bias, normalized_shape, x.meta["val"].dtype)
    rank = len(shape_of(x))
    axes = list(range(rank - len(normalized_shape), rank))
    normed = relax.op.nn.layer_norm(
        ctx.value(x), gamma, beta, axes, eps, center=bias is not None, scale=weight is not None
    )
    return ctx.emit(normed), None, None


@converts(aten.native_layer_norm_backward.default, dtypes=_DTYPES)
def _native_layer_norm_backward(
    ctx: Importer, node: fx.Node, grad_out: fx.Node, x: fx.Node, *_: Any
) -> Any:
    operands = [n for n in node.all_input_nodes if n.meta["val"].dtype != _wide(x)]
    _check(node, x, *operands, unread=())
    return _with_statistics(ctx, node, x)


@converts(aten._fused_rms_norm.default, dtypes=_DTYPES)
def _fused_rms_norm(
    ctx: Importer,
    node: fx.Node,
    x: fx.Node,
    normalized_shape: Sequence[int],
    weight: Operand,
    eps: float | None,
) -> Any:
    _check(node, x, weight, unread=())
    return _with_statistics(ctx, node, x)


@converts(aten._fused_rms_norm_backward.default, dtypes=_DTYPES)
def _fused_rms_norm_backward(
    ctx: Importer, node: fx.Node, grad_out: fx.Node, x: fx.Node, *_: Any
) -> Any:
    operands = [n for n in node.all_input_nodes if n.meta["val"].dtype != _wide(x)]
    _check(node, x, *operands, unread=())
    return _with_statistics(ctx, node, x)


def _with_statistics(ctx: Importer, node: fx.Node, x: fx.Node) -> Any:
    """A layer norm, or its backward, whose mean and deviation are in the dtype of the sums."""
    if x.meta["val"].device.type not in _COMPILED_WITH_STATISTICS:
        raise Declined("a norm whose saved statistics are read")
    read = _STATISTICS.get(node.target)
    if read is None:
        dtypes = {value.dtype for value in node.meta["val"][1:]}
    else:
        dtypes = {n.meta["val"].dtype for n in node.args[read] if isinstance(n, fx.Node)}
    if dtypes != {_wide(x)} or not math.prod(shape_of(x)):
        raise Declined("statistics of another dtype, or of nothing")
    return ctx.compiled_call(node)


@converts(aten.rms_norm.default, dtypes=_DTYPES)
def _rms_norm(
    ctx: Importer,
    node: fx.Node,
    x: fx.Node,
    normalized_shape: Sequence[int],
    weight: Operand = None,
    eps: float | None = None,
) -> relax.Expr:
    _check(node, x, weight, unread=())
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
    _check(node, x, weight, bias, unread=(1, 2))
    gamma, beta = _affine(ctx, weight, bias, [channels], _wide(x))
    normed = relax.op.nn.group_norm(
        ctx.tensor(x, _wide(x)),
        gamma,
        beta,
        groups,
        1,
        list(range(2, len(shape_of(x)))),
        eps,
        center=bias is not None,
        scale=weight is not None,
    )
    return _narrow(ctx, ctx.emit(normed), x), None, None


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
    _check(node, x, weight, bias, mean, variance, unread=(1, 2))
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
    _check(node, x, weight, bias, unread=(1, 2))
    if not training:
        raise Declined("batch norm without any statistics")
    if shape_of(x)[0] == 1 and len(shape_of(x)) > 2:
        return _instance_norm(ctx, x, weight, bias, eps), None, None
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
    _check(node, x, weight, bias, mean, variance, unread=(1, 2))
    if not training:
        normed, _, _ = _batch_norm(ctx, x, weight, bias, eps, (mean, variance))
        return _narrow(ctx, normed, x), None, None, ctx.value(mean), ctx.value(variance)
    count = math.prod(shape_of(x)) // shape_of(x)[1]
    if count < 2:
        raise Declined("the unbiased variance of one value")
    y, batch_mean, biased = _batch_norm(ctx, x, weight, bias, eps, None)
    value = x.meta["val"]
    if value.dtype is torch.bfloat16 and value.device.type == "cpu":
        return (
            _narrow(ctx, y, x),
            None,
            None,
            *moved_as_bfloat16(ctx, (mean, variance), (batch_mean, biased), count, momentum),
        )
    unbiased = ctx.emit(relax.op.multiply(biased, ctx.tensor(count / (count - 1), _wide(x))))
    statistics = [
        _narrow(ctx, moved(ctx, ctx.tensor(old, _wide(x)), new, momentum, _wide(x)), x)
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
    _check(node, unread=(3,))
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
    """``(y, mean, biased variance)`` in ``_wide(x)``, by the batch's statistics or those given.

    A momentum of 1 asks for the batch's own mean and variance: PyTorch moves the unbiased
    variance, Relax the biased one.
    """
    dtype, channels = _wide(x), [shape_of(x)[1]]
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


def _instance_norm(
    ctx: Importer, x: fx.Node, weight: Operand, bias: Operand, eps: float
) -> relax.Expr:
    """Batch norm of one sample: PyTorch makes a channel of every channel of every sample."""
    gamma, beta = _affine(ctx, weight, bias, [shape_of(x)[1]], _wide(x))
    normed = relax.op.nn.instance_norm(
        ctx.tensor(x, _wide(x)),
        gamma,
        beta,
        1,
        list(range(2, len(shape_of(x)))),
        eps,
        center=bias is not None,
        scale=weight is not None,
    )
    return _narrow(ctx, ctx.emit(normed), x)
