"""Converters of the backward operators that PyTorch's autograd calls.

The formulas and conventions are PyTorch's: the gradient of a threshold is zero for an input that
equals it.
"""

from __future__ import annotations

import torch
from torch import fx
from tvm import relax

from tvmbridge.frontend.elementwise import result_dtype
from tvmbridge.frontend.importer import Importer
from tvmbridge.frontend.registry import FLOATS, Declined, converts
from tvmbridge.frontend.shapes import shape_of
from tvmbridge.gradients.slopes import gelu_slope, gelu_tanh_slope, silu_slope
from tvmbridge.kernels.dtypes import to_relax_dtype

aten = torch.ops.aten
op = relax.op


@converts(aten.threshold_backward.default, dtypes=FLOATS)
def _threshold_backward(
    ctx: Importer, node: fx.Node, grad: fx.Node, x: fx.Node, threshold: int | float
) -> relax.Expr:
    """Emit zero for ``x <= threshold`` and the cotangent otherwise, also if x is NaN."""
    dtype = result_dtype(node)
    stopped = ctx.emit(op.less_equal(ctx.value(x), ctx.tensor(threshold, dtype)))
    return op.where(stopped, ctx.tensor(0, dtype), ctx.value(grad))


@converts(aten.tanh_backward.default, dtypes=FLOATS)
def _tanh_backward(ctx: Importer, node: fx.Node, grad: fx.Node, result: fx.Node) -> relax.Expr:
    square = ctx.emit(op.multiply(ctx.value(result), ctx.value(result)))
    slope = ctx.emit(op.subtract(ctx.tensor(1, result_dtype(node)), square))
    return op.multiply(ctx.value(grad), slope)


@converts(aten.sigmoid_backward.default, dtypes=FLOATS)
def _sigmoid_backward(ctx: Importer, node: fx.Node, grad: fx.Node, result: fx.Node) -> relax.Expr:
    rest = ctx.emit(op.subtract(ctx.tensor(1, result_dtype(node)), ctx.value(result)))
    slope = ctx.emit(op.multiply(rest, ctx.value(result)))
    return op.multiply(ctx.value(grad), slope)


@converts(aten.silu_backward.default, dtypes=FLOATS)
def _silu_backward(ctx: Importer, node: fx.Node, grad: fx.Node, x: fx.Node) -> relax.Expr:
    return op.multiply(ctx.value(grad), silu_slope(ctx.builder, ctx.value(x)))


@converts(aten.gelu_backward.default, dtypes=FLOATS)
def _gelu_backward(
    ctx: Importer, node: fx.Node, grad: fx.Node, x: fx.Node, approximate: str = "none"
) -> relax.Expr:
    slope = gelu_tanh_slope if approximate == "tanh" else gelu_slope
    return op.multiply(ctx.value(grad), slope(ctx.builder, ctx.value(x)))


@converts(aten._softmax_backward_data.default, dtypes=FLOATS)
def _softmax_backward(
    ctx: Importer, node: fx.Node, grad: fx.Node, result: fx.Node, dim: int, dtype: torch.dtype
) -> relax.Expr:
    """Emit ``(g - sum(g * y)) * y``, where ``g`` is the cotangent and ``y`` the softmax."""
    if not shape_of(node):
        raise Declined("softmax of a 0-d tensor")
    product = ctx.emit(op.multiply(ctx.value(grad), ctx.value(result)))
    total = ctx.emit(op.sum(product, [dim % len(shape_of(node))], keepdims=True))
    centred = ctx.emit(op.subtract(ctx.value(grad), total))
    return op.multiply(centred, ctx.value(result))


@converts(aten._log_softmax_backward_data.default, dtypes=FLOATS)
def _log_softmax_backward(
    ctx: Importer, node: fx.Node, grad: fx.Node, result: fx.Node, dim: int, dtype: torch.dtype
) -> relax.Expr:
    """Emit ``g - exp(y) * sum(g)``, where ``g`` is the cotangent and ``y`` the log-softmax."""
    if not shape_of(node):
        raise Declined("softmax of a 0-d tensor")
    total = ctx.emit(op.sum(ctx.value(grad), [dim % len(shape_of(node))], keepdims=True))
    scaled = ctx.emit(op.multiply(ctx.emit(op.exp(ctx.value(result))), total))
    return op.subtract(ctx.value(grad), scaled)


@converts(
    aten.embedding_dense_backward.default,
    dtypes=FLOATS | {torch.int32, torch.int64},
    widens=False,
)
def _embedding_backward(
    ctx: Importer,
    node: fx.Node,
    grad: fx.Node,
    indices: fx.Node,
    rows: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> relax.Expr:
    """Emit the sum of the cotangent's rows for each index, and zero for the padding index."""
    if scale_grad_by_freq:
        raise Declined("a gradient that is scaled by frequency")
    if result_dtype(indices) not in (torch.int32, torch.int64) or result_dtype(grad) not in FLOATS:
        raise Declined("indices that are no integers, or a cotangent that is one")
    width, dtype = shape_of(node)[1], to_relax_dtype(result_dtype(node))
    flat = ctx.emit(op.reshape(ctx.value(indices), (-1,)))
    values = ctx.emit(op.reshape(ctx.value(grad), (-1, width)))
    if padding_idx >= 0:
        padding = ctx.tensor(padding_idx, result_dtype(indices))
        padded = ctx.emit(op.equal(ctx.emit(op.expand_dims(flat, 1)), padding))
        values = ctx.emit(op.where(padded, ctx.tensor(0, result_dtype(node)), values))
    # take_backward reads only the shape of the table.
    table = ctx.emit(op.zeros((rows, width), dtype))
    return op.grad.take_backward(values, table, flat, axis=0)
