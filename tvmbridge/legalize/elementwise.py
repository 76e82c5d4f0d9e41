"""Legalisation of unary functions, and of maximum, minimum, relu and clip, which keep NaN as PyTorch does."""

from __future__ import annotations

from tvm import te, tirx
from tvm import relax
from tvm.ir import Call, Expr
from tvm.relax.transform.legalize_ops.common import LegalizeFunc

from tvmbridge.legalize.functions import FLOATS, FUNCTIONS, ScalarFunction, is_nan
from tvmbridge.legalize.lets import Lets, constant, dtype_of

#: relax.op.transform pattern numbers: how FuseOps may combine a function with its neighbours.
ELEMENTWISE, BROADCAST, INJECTIVE, REDUCTION, OPAQUE = 0, 1, 2, 3, 8


def unary(function: ScalarFunction, name: str) -> LegalizeFunc:
    """Return the legalisation of a one-argument operator, ``function`` applied to every element."""

    def compute(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *i: function(x(*i)), name=f"T_{name}")

    def legalize(bb: relax.BlockBuilder, call: Call) -> Expr:
        attrs = {"op_pattern": ELEMENTWISE}
        return bb.call_te(
            compute, call.args[0], primfunc_name_hint=f"tir_{name}", primfunc_attrs=attrs
        )

    return legalize


def unary_float(name: str) -> LegalizeFunc:
    """Return the legalisation by ``FUNCTIONS[name]``; an integer argument is computed in the result's dtype."""

    def legalize(bb: relax.BlockBuilder, call: Call) -> Expr:
        result = str(call.ty.dtype.dtype)
        dtype = result if result in FLOATS else "float32"
        return unary(lambda x: FUNCTIONS[name](tirx.Cast(dtype, x)), name)(bb, call)

    return legalize


def larger(a: Expr, b: Expr) -> Expr:
    """Return the larger of two scalars of one dtype; NaN if either is."""
    if dtype_of(a) not in FLOATS:
        return tirx.Max(a, b)
    lets = Lets()
    a, b = lets.bind(a, "a"), lets.bind(b, "b")
    return lets.close(tirx.Select(tirx.Or(a > b, is_nan(a)), a, b))


def smaller(a: Expr, b: Expr) -> Expr:
    """Return the smaller of two scalars of one dtype; NaN if either is."""
    if dtype_of(a) not in FLOATS:
        return tirx.Min(a, b)
    lets = Lets()
    a, b = lets.bind(a, "a"), lets.bind(b, "b")
    return lets.close(tirx.Select(tirx.Or(a < b, is_nan(a)), a, b))


def relu(x: Expr) -> Expr:
    """Return x where positive or NaN, else 0."""
    lets = Lets()
    x, zero = lets.bind(x, "x"), constant(0, dtype_of(x))
    return lets.close(tirx.Select(x <= zero, zero, x))
