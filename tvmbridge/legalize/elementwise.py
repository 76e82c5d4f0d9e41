"""Legalization of unary functions, maximum, minimum, relu and clip; NaN propagates as in eager."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import relax, te, tirx
from tvm.ir import Call, Expr, GenericConst
from tvm.relax.transform.legalize_ops.common import LegalizeFunc

from tvmbridge.legalize.broadcast import ELEMENTWISE, emit_broadcast
from tvmbridge.legalize.functions import FLOATS, FUNCTIONS, HALF, ScalarFunction, is_nan
from tvmbridge.legalize.lets import Lets, constant, dtype_of


def unary(function: ScalarFunction, name: str) -> LegalizeFunc:
    """Return the legalization of an operator that applies ``function`` to every element."""

    def compute(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *i: function(x(*i)), name=f"T_{name}")

    def legalize(bb: relax.BlockBuilder, call: Call) -> Expr:
        attrs = {"op_pattern": ELEMENTWISE}
        return bb.call_te(
            compute, call.args[0], primfunc_name_hint=f"tir_{name}", primfunc_attrs=attrs
        )

    return legalize


def unary_float(name: str) -> LegalizeFunc:
    """Return the legalization by ``FUNCTIONS[name]``; integers are cast to the result's dtype."""

    def legalize(bb: relax.BlockBuilder, call: Call) -> Expr:
        result = str(call.ty.dtype.dtype)
        dtype = result if result in FLOATS else "float32"
        return unary(lambda x: FUNCTIONS[name](tirx.Cast(dtype, x)), name)(bb, call)

    return legalize


def larger(a: Expr, b: Expr) -> Expr:
    """Return the larger of two scalars of one dtype; NaN if either is."""
    return _choose(a, b, lambda x, y: x > y, tirx.Max)


def smaller(a: Expr, b: Expr) -> Expr:
    """Return the smaller of two scalars of one dtype; NaN if either is."""
    return _choose(a, b, lambda x, y: x < y, tirx.Min)


def _choose(
    a: Expr, b: Expr, better: Callable[[Expr, Expr], Expr], exact: Callable[[Expr, Expr], Expr]
) -> Expr:
    dtype = dtype_of(a)
    if dtype not in FLOATS:
        return exact(a, b)
    if dtype in HALF:
        wide = _choose(tirx.Cast("float32", a), tirx.Cast("float32", b), better, exact)
        return tirx.Cast(dtype, wide)
    lets = Lets()
    a, b = lets.bind(a, "a"), lets.bind(b, "b")
    return lets.close(tirx.Select(tirx.Or(better(a, b), is_nan(a)), a, b))


def relu(x: Expr) -> Expr:
    """Return ``x`` if it is positive or NaN, otherwise 0."""
    lets = Lets()
    x, zero = lets.bind(x, "x"), constant(0, dtype_of(x))
    return lets.close(tirx.Select(x < zero, zero, x))


def _as_scalar(arg: Expr, dtype: str) -> Expr | None:
    """Return a 0-d constant as an immediate; None for anything else."""
    if isinstance(arg, GenericConst) and not arg.value.shape:
        return constant(arg.value.numpy().item(), dtype)
    return None


def binary(function: Callable[[Expr, Expr], Expr], name: str) -> LegalizeFunc:
    """Return the legalization of a broadcasting operator of two operands of one dtype."""

    def legalize(bb: relax.BlockBuilder, call: Call) -> Expr:
        dtype = str(call.ty.dtype.dtype)
        scalars = [_as_scalar(arg, dtype) for arg in call.args]
        tensors = [arg if s is None else None for arg, s in zip(call.args, scalars, strict=True)]

        def element(sides: list[Expr | None]) -> Expr:
            return function(*[e if s is None else s for s, e in zip(scalars, sides, strict=True)])

        return emit_broadcast(bb, call, tensors, element, f"T_{name}", f"tir_{name}")

    return legalize


def clip(bb: relax.BlockBuilder, call: Call) -> Expr:
    """Legalize relax.clip: NaN stays NaN; bounds outside the range of the dtype have no effect."""
    dtype = str(call.ty.dtype.dtype)
    low, high = (arg.value for arg in call.args[1:3])

    def limit(x: Expr) -> Expr:
        lets = Lets()
        value: Expr = lets.bind(x, "x")
        if low > _least(dtype):
            edge = _immediate(low, dtype)
            value = lets.bind(tirx.Select(value < edge, edge, value), "raised")
        if high < _most(dtype):
            edge = _immediate(high, dtype)
            value = lets.bind(tirx.Select(value > edge, edge, value), "lowered")
        return lets.close(value)

    def compute(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *i: limit(x(*i)), name="T_clip")

    attrs = {"op_pattern": ELEMENTWISE}
    return bb.call_te(compute, call.args[0], primfunc_name_hint="tir_clip", primfunc_attrs=attrs)


def _least(dtype: str) -> float | int:
    return -math.inf if dtype in FLOATS else int(tirx.min_value(dtype).value)


def _most(dtype: str) -> float | int:
    return math.inf if dtype in FLOATS else int(tirx.max_value(dtype).value)


def _immediate(bound: float | int, dtype: str) -> Expr:
    """Return a bound as an immediate of ``dtype``, limited to the range of an integer dtype."""
    if dtype in FLOATS:
        return constant(float(bound), dtype)
    return constant(int(max(_least(dtype), min(bound, _most(dtype)))), dtype)
