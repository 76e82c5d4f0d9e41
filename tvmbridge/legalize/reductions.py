"""Legalization of sum, mean, variance, prod, max and min.

Half precisions accumulate in float32, and NaN propagates. A reduction over trailing axes has the
operator pattern of a broadcast. So FuseOps fuses a chain of row-wise operators, such as a
normalization, into one function. The CPU schedules keep a row in cache across such a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import prod

from tvm import relax, te, tirx
from tvm.ir import Call, Expr
from tvm.relax.transform.legalize_ops.common import LegalizeFunc

from tvmbridge.legalize.broadcast import BROADCAST, REDUCTION, shape_of
from tvmbridge.legalize.elementwise import larger, smaller
from tvmbridge.legalize.functions import HALF
from tvmbridge.legalize.lets import Lets, constant

Reducer = Callable[..., Expr]


def accumulator_dtype(dtype: str) -> str:
    """Return the dtype in which values of ``dtype`` are summed."""
    return "float32" if dtype in HALF else dtype


def static_shape(x: te.Tensor) -> list[int]:
    """Return the shape of a tensor whose extents are constants."""
    return [int(extent) for extent in x.shape]


def normalized_axes(axes: Sequence[int] | None, ndim: int) -> list[int]:
    """Return the axes as sorted non-negative numbers; None stands for all."""
    if axes is None:
        return list(range(ndim))
    return sorted(int(axis) % ndim for axis in axes)


def cast(x: te.Tensor, dtype: str, name: str = "T_cast") -> te.Tensor:
    """Return ``x`` in ``dtype``; the tensor itself if it has that dtype already."""
    if str(x.dtype) == dtype:
        return x
    return te.compute(x.shape, lambda *i: tirx.Cast(dtype, x(*i)), name=name)


def reduce(x: te.Tensor, axes: list[int], reducer: Reducer, name: str, keep: bool) -> te.Tensor:
    """Return ``x`` reduced over ``axes``; if ``keep``, they stay with extent 1."""
    shape = static_shape(x)
    iters = {axis: te.reduce_axis((0, shape[axis]), name=f"k{axis}") for axis in axes}
    kept = [axis for axis in range(len(shape)) if keep or axis not in iters]

    def compute(*indices: Expr) -> Expr:
        at = dict(zip(kept, indices, strict=True))
        source = x(*[iters.get(axis, at.get(axis)) for axis in range(len(shape))])
        return reducer(source, axis=list(iters.values()))

    return te.compute([1 if a in iters else shape[a] for a in kept], compute, name=name)


def nan_reducer(dtype: str, pick: Callable[[Expr, Expr], Expr], start: Expr) -> Reducer:
    """Return a reducer by ``pick``, which keeps NaN; ``start`` is its initial value."""
    return te.comm_reducer(pick, lambda _: start, name=f"{pick.__name__}_{dtype}")


def reducer_for(kind: str, dtype: str) -> Reducer:
    """Return the reducer of ``kind`` (sum, prod, max or min) over values of ``dtype``."""
    if kind == "sum":
        return te.comm_reducer(lambda a, b: a + b, lambda t: constant(0, t), name="sum")
    if kind == "prod":
        return te.comm_reducer(lambda a, b: a * b, lambda t: constant(1, t), name="prod")
    floating = dtype.startswith(("float", "bfloat"))
    if kind == "max":
        start = -tirx.infinity(dtype) if floating else tirx.min_value(dtype)
        return nan_reducer(dtype, larger, start)
    start = tirx.infinity(dtype) if floating else tirx.max_value(dtype)
    return nan_reducer(dtype, smaller, start)


def plain_sum(x: te.Tensor, axes: list[int], keep: bool) -> te.Tensor:
    """Return the sum over ``axes``, in the dtype of ``x``, which must be an accumulator dtype."""
    return reduce(x, axes, reducer_for("sum", str(x.dtype)), "T_sum", keep)


def mean_of(x: te.Tensor, axes: list[int], keep: bool) -> te.Tensor:
    """Return the mean over ``axes``, in the dtype of ``x``, which must be an accumulator dtype."""
    shape = static_shape(x)
    total = plain_sum(x, axes, keep)
    count = constant(float(prod(shape[a] for a in axes)), str(x.dtype))
    return te.compute(total.shape, lambda *i: total(*i) / count, name="T_mean")


def squared_deviation(x: te.Tensor, mean: te.Tensor) -> te.Tensor:
    """Return (x - mean)^2; ``mean`` has extent 1 on the axes that were reduced."""
    where = [int(extent) == 1 for extent in mean.shape]

    def compute(*i: Expr) -> Expr:
        lets = Lets()
        at = [constant(0, "int64") if one else index for one, index in zip(where, i, strict=True)]
        d = lets.bind(x(*i) - mean(*at), "d")
        return lets.close(d * d)

    return te.compute(x.shape, compute, name="T_deviation")


def variance_of(x: te.Tensor, mean: te.Tensor, axes: list[int], keep: bool) -> te.Tensor:
    """Return the biased variance of ``x``, whose dtype must be an accumulator dtype.

    ``mean`` is the mean over ``axes``, with extent 1 on them.
    """
    return mean_of(squared_deviation(x, mean), axes, keep)


_OF_NOTHING = {"sum": 0.0, "prod": 1.0, "mean": math.nan, "variance": math.nan}


def _of_nothing(kind: str, x: te.Tensor, axes: list[int], keep: bool) -> te.Tensor:
    """Return the reduction of no elements; a loop of no iterations would not write the result."""
    shape = static_shape(x)
    kept = [1 if a in axes else n for a, n in enumerate(shape) if keep or a not in axes]
    value = constant(_OF_NOTHING[kind], str(x.dtype))
    return te.compute(kept, lambda *_: value, name=f"T_{kind}")


def _compute(kind: str, x: te.Tensor, axes: list[int], keep: bool) -> te.Tensor:
    dtype = str(x.dtype)
    if kind in _OF_NOTHING and any(static_shape(x)[axis] == 0 for axis in axes):
        return _of_nothing(kind, x, axes, keep)
    wide = cast(x, accumulator_dtype(dtype))
    if kind == "mean":
        result = mean_of(wide, axes, keep)
    elif kind == "variance":
        result = variance_of(wide, mean_of(wide, axes, True), axes, keep)
    else:
        result = reduce(wide, axes, reducer_for(kind, str(wide.dtype)), f"T_{kind}", keep)
    return cast(result, dtype)


def pattern_of(shape: Sequence[int], axes: list[int]) -> int:
    """Return the operator pattern of a reduction: broadcast if it reduces each of several rows."""
    rows = prod(shape[: len(shape) - len(axes)])
    trailing = axes == list(range(len(shape) - len(axes), len(shape)))
    return BROADCAST if trailing and rows > 1 else REDUCTION


def reduction(kind: str) -> LegalizeFunc:
    """Return the legalization of a Relax reduction with attributes ``axis`` and ``keepdims``."""

    def legalize(bb: relax.BlockBuilder, call: Call) -> Expr:
        shape = shape_of(call.args[0])
        axes = normalized_axes(call.attrs.axis, len(shape))
        keep = bool(call.attrs.keepdims)

        def compute(x: te.Tensor) -> te.Tensor:
            return _compute(kind, x, axes, keep)

        attrs = {"op_pattern": pattern_of(shape, axes)}
        return bb.call_te(
            compute, call.args[0], primfunc_name_hint=f"tir_{kind}", primfunc_attrs=attrs
        )

    return legalize
