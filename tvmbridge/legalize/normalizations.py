"""Legalization of softmax, log_softmax, layer_norm and rms_norm, in float32 for half precisions."""

from __future__ import annotations

from tvm import relax, te, tirx
from tvm.ir import Call, Expr

from tvmbridge.legalize.broadcast import shape_of
from tvmbridge.legalize.float32 import exp_nonpositive
from tvmbridge.legalize.functions import FUNCTIONS, for_target
from tvmbridge.legalize.lets import constant
from tvmbridge.legalize.reductions import (
    accumulator_dtype,
    cast,
    mean_of,
    normalized_axes,
    pattern_of,
    plain_sum,
    reduce,
    variance_of,
)

_ZERO = constant(0, "int64")


def _at(indices: tuple[Expr, ...], axes: list[int]) -> list[Expr]:
    """Return ``indices`` with 0 for each of ``axes``, the reduced axes."""
    return [_ZERO if axis in axes else index for axis, index in enumerate(indices)]


_EXP32 = for_target("exp", exp_nonpositive)


def _exponential(x: Expr, dtype: str) -> Expr:
    return FUNCTIONS["exp"](x) if dtype == "float64" else _EXP32(x)


def _shifted_exponentials(x: te.Tensor, axes: list[int]) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    """Return the maximum of each row, e^(x - maximum), and the sum of the latter over the row.

    In maximum and sum, the reduced axes have extent 1. The maximum may ignore a NaN, but the
    exponentials have it. A row of -inf gives NaN.
    """
    dtype = str(x.dtype)
    # The maximum starts at -inf, so that a row of -inf gives -inf - -inf, which is NaN. If it
    # started at the smallest finite number, the NaN would depend on underflow, by 0 / 0.
    plain_max = te.comm_reducer(
        lambda a, b: tirx.Max(a, b), lambda t: -tirx.infinity(t), name="max"
    )
    top = reduce(x, axes, plain_max, "T_max", True)
    powers = te.compute(
        x.shape, lambda *i: _exponential(x(*i) - top(*_at(i, axes)), dtype), name="T_exp"
    )
    return top, powers, plain_sum(powers, axes, True)


def te_softmax(x: te.Tensor, axis: int) -> te.Tensor:
    """Return the softmax over ``axis``: e^(x - max) times the reciprocal of its sum."""
    dtype, axes = str(x.dtype), normalized_axes([axis], len(x.shape))
    _, powers, total = _shifted_exponentials(cast(x, accumulator_dtype(dtype)), axes)
    one = constant(1.0, str(total.dtype))
    inverse = te.compute(total.shape, lambda *i: one / total(*i), name="T_inverse")
    result = te.compute(x.shape, lambda *i: powers(*i) * inverse(*_at(i, axes)), name="T_softmax")
    return cast(result, dtype)


def te_log_softmax(x: te.Tensor, axis: int) -> te.Tensor:
    """Return x - max - log(sum(e^(x - max))), with maximum and sum over ``axis``."""
    dtype, axes = str(x.dtype), normalized_axes([axis], len(x.shape))
    wide = cast(x, accumulator_dtype(dtype))
    top, _, total = _shifted_exponentials(wide, axes)
    logs = te.compute(total.shape, lambda *i: FUNCTIONS["log"](total(*i)), name="T_log")
    result = te.compute(
        x.shape,
        lambda *i: wide(*i) - top(*_at(i, axes)) - logs(*_at(i, axes)),
        name="T_log_softmax",
    )
    return cast(result, dtype)


def te_norm(
    x: te.Tensor,
    parameters: tuple[te.Tensor | None, te.Tensor | None],
    axes: list[int],
    epsilon: float,
    *,
    centered: bool,
) -> tuple[te.Tensor, te.Tensor | None, te.Tensor]:
    """Return a layer norm, its mean and 1 / sqrt(var + epsilon), with statistics over ``axes``.

    Args:
        parameters: weight and bias, over ``axes``; either may be None.
        centered: False for an RMS norm, which has no mean: var is then the mean of squares.
    """
    dtype = str(x.dtype)
    acc = accumulator_dtype(dtype)
    wide = cast(x, acc)
    if centered:
        mean = mean_of(wide, axes, True)
        var = variance_of(wide, mean, axes, True)
    else:
        mean = None
        square = te.compute(x.shape, lambda *i: wide(*i) * wide(*i), name="T_square")
        var = mean_of(square, axes, True)
    inverse = te.compute(
        var.shape,
        lambda *i: FUNCTIONS["rsqrt"](var(*i) + constant(epsilon, acc)),
        name="T_rsqrt",
    )
    weight, bias = parameters

    def compute(*i: Expr) -> Expr:
        row, element = _at(i, axes), [i[axis] for axis in axes]
        value = (wide(*i) if mean is None else wide(*i) - mean(*row)) * inverse(*row)
        if weight is not None:
            value = value * tirx.Cast(acc, weight(*element))
        if bias is not None:
            value = value + tirx.Cast(acc, bias(*element))
        return tirx.Cast(dtype, value)

    name = "T_layer_norm" if centered else "T_rms_norm"
    return te.compute(x.shape, compute, name=name), mean, inverse


def _pattern(call: Call, axes: list[int]) -> dict[str, int]:
    return {"op_pattern": pattern_of(shape_of(call), axes)}


def softmax(bb: relax.BlockBuilder, call: Call) -> Expr:
    """Legalize relax.nn.softmax and relax.nn.log_softmax."""
    axis = int(call.attrs.axis)
    is_log = call.op.name == "relax.nn.log_softmax"
    return bb.call_te(
        te_log_softmax if is_log else te_softmax,
        call.args[0],
        axis,
        primfunc_name_hint="log_softmax" if is_log else "softmax",
        primfunc_attrs=_pattern(call, normalized_axes([axis], len(shape_of(call)))),
    )


def norm(bb: relax.BlockBuilder, call: Call) -> Expr:
    """Legalize relax.nn.layer_norm and relax.nn.rms_norm."""
    axes = normalized_axes(call.attrs.axes, len(shape_of(call)))
    epsilon, centered = float(call.attrs.epsilon), call.op.name == "relax.nn.layer_norm"

    def compute(x: te.Tensor, weight: te.Tensor, bias: te.Tensor | None = None) -> te.Tensor:
        return te_norm(x, (weight, bias), axes, epsilon, centered=centered)[0]

    return bb.call_te(
        compute,
        *call.args,
        primfunc_name_hint="layer_norm" if centered else "rms_norm",
        primfunc_attrs=_pattern(call, axes),
    )
