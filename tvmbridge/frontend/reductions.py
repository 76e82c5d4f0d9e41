"""Converters of reductions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from tvm import relax

from tvmbridge.frontend.elementwise import result_dtype
from tvmbridge.frontend.importer import Importer
from tvmbridge.frontend.registry import COMPUTED, FLOATS, HALVES, NUMBERS, Declined, converts
from tvmbridge.frontend.shapes import shape_of
from tvmbridge.kernels.aten_call import call_overload

aten = torch.ops.aten


def axes_of(node: fx.Node, dims: Sequence[int] | int | None) -> list[int]:
    """Return the reduced axes of ``node``'s tensor, sorted and non-negative.

    If ``dims`` is None or empty, all axes are reduced.

    Raises:
        Declined: the tensor has no dimensions.
    """
    rank = len(shape_of(node))
    if rank == 0:
        raise Declined("a reduction of a 0-d tensor")
    if dims is None or dims == []:
        return list(range(rank))
    listed = [dims] if isinstance(dims, int) else dims
    return sorted(d % rank for d in listed)


def _reduce(
    ctx: Importer,
    node: fx.Node,
    op: Callable[..., relax.Expr],
    x: fx.Node,
    dims: Any,
    keepdim: bool,
) -> relax.Expr:
    value = ctx.tensor(x, result_dtype(node))
    return op(value, axes_of(x, dims), keepdim) if shape_of(x) else value


def _plain(op: Callable[..., relax.Expr]) -> Callable[..., relax.Expr]:
    def convert(
        ctx: Importer, node: fx.Node, x: fx.Node, dims: Any = None, keepdim: bool = False, **_: Any
    ) -> relax.Expr:
        return _reduce(ctx, node, op, x, dims, keepdim)

    return convert


converts(aten.sum.dim_IntList, aten.sum.default)(_plain(relax.op.sum))
converts(aten.mean.dim, aten.mean.default, dtypes=FLOATS)(_plain(relax.op.mean))


@converts(aten.amax.default, aten.amin.default, dtypes=NUMBERS)
def _extremum(
    ctx: Importer, node: fx.Node, x: fx.Node, dims: Any = None, keepdim: bool = False
) -> relax.Expr:
    op = relax.op.max if node.target is aten.amax.default else relax.op.min
    if shape_of(x):
        return _reduce(ctx, node, op, x, dims, keepdim)
    # An extremum of one element instead of the element itself: its gradient is NaN for NaN.
    row = ctx.emit(relax.op.reshape(ctx.tensor(x, result_dtype(node)), [1]))
    return op(row, [0])


def _truth(op: Callable[..., relax.Expr]) -> Callable[..., relax.Expr]:
    """Return a converter that reduces booleans, as the numbers 0 and 1, by ``op``."""

    def convert(
        ctx: Importer, node: fx.Node, x: fx.Node, dims: Any = None, keepdim: bool = False
    ) -> relax.Expr:
        if not shape_of(x):
            return ctx.tensor(x, torch.bool)
        flags = ctx.cast(ctx.tensor(x, torch.bool), torch.bool, torch.int32)
        extreme = ctx.emit(op(flags, axes_of(x, dims), keepdim))
        return relax.op.not_equal(extreme, relax.const(0, "int32"))

    return convert


converts(aten.any.dim, aten.any.dims, aten.any.default, dtypes=COMPUTED)(_truth(relax.op.max))
converts(aten.all.dim, aten.all.dims, aten.all.default, dtypes=COMPUTED)(_truth(relax.op.min))


@converts(aten.linalg_vector_norm.default, dtypes=FLOATS)
def _vector_norm(
    ctx: Importer,
    node: fx.Node,
    x: fx.Node,
    order: int | float = 2,
    dims: Any = None,
    keepdim: bool = False,
    **_: Any,
) -> relax.Expr:
    value = ctx.tensor(x, result_dtype(node))
    axes = axes_of(x, dims)
    if order == 2:
        square = ctx.emit(relax.op.multiply(value, value))
        return relax.op.sqrt(ctx.emit(relax.op.sum(square, axes, keepdim)))
    size = ctx.emit(relax.op.abs(value))
    if order == 1:
        return relax.op.sum(size, axes, keepdim)
    if order == math.inf:
        return relax.op.max(size, axes, keepdim)
    raise Declined("a norm of an unusual order")


@converts(aten.max.dim, aten.min.dim, dtypes=NUMBERS)
def _extremum_and_place(
    ctx: Importer, node: fx.Node, x: fx.Node, dim: int, keepdim: bool = False
) -> tuple[relax.Expr, ...]:
    """Emit the extrema by a reduction, and their indices by argmax or argmin.

    If several elements are equal, the index is that of the first.
    """
    shape = shape_of(x)
    if not shape:
        raise Declined("an extremum of a 0-d tensor")
    largest = node.target is aten.max.dim
    op = relax.op.max if largest else relax.op.min
    values = ctx.emit(op(ctx.value(x), [dim % len(shape)], keepdim))
    type_ = relax.TensorType([int(n) for n in node.meta["val"][1].shape], "int64")
    name = "aten.argmax.default" if largest else "aten.argmin.default"
    args = [{"tensor": 0}, dim % len(shape), keepdim]
    places = call_overload(name, args, [ctx.value(x)], type_, compiled=True)
    return values, ctx.emit(places)


@converts(aten._softmax.default, aten._log_softmax.default, dtypes=FLOATS | HALVES)
def _softmax(ctx: Importer, node: fx.Node, x: fx.Node, dim: int, half_to_float: bool) -> relax.Expr:
    rank = len(shape_of(x))
    if rank == 0:
        raise Declined("softmax of a 0-d tensor")
    op = relax.op.nn.softmax if node.target is aten._softmax.default else relax.op.nn.log_softmax
    dtype = x.meta["val"].dtype
    if dtype not in HALVES:
        return op(ctx.value(x), dim % rank)
    # PyTorch's kernel computes in float32 and rounds the result once.
    wide = ctx.emit(op(ctx.tensor(x, torch.float32), dim % rank))
    return ctx.cast(wide, torch.float32, result_dtype(node))


def _moments(
    ctx: Importer, x: fx.Node, dims: Any, correction: int | float | None, keepdim: bool
) -> tuple[relax.Expr, relax.Expr]:
    """Return variance and mean over ``dims``."""
    axes = axes_of(x, dims)
    count = 1
    for axis in axes:
        count *= shape_of(x)[axis]
    freedom = count - (1 if correction is None else correction)
    if freedom <= 0:
        raise Declined("a variance without a degree of freedom")
    value, dtype = ctx.value(x), x.meta["val"].dtype
    mean = ctx.emit(relax.op.mean(value, axes, True))
    deviation = ctx.emit(relax.op.subtract(value, mean))
    square = ctx.emit(relax.op.multiply(deviation, deviation))
    total = ctx.emit(relax.op.sum(square, axes, keepdim))
    variance = ctx.emit(relax.op.divide(total, ctx.tensor(float(freedom), dtype)))
    return variance, mean if keepdim else ctx.emit(relax.op.squeeze(mean, axes))


@converts(aten.var.correction, aten.var_mean.correction, dtypes=FLOATS)
def _variance(
    ctx: Importer,
    node: fx.Node,
    x: fx.Node,
    dims: Any = None,
    *,
    correction: int | float | None = None,
    keepdim: bool = False,
) -> Any:
    moments = _moments(ctx, x, dims, correction, keepdim)
    return moments[0] if node.target is aten.var.correction else moments
