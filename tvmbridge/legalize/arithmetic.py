"""Legalisation of sums, differences, products, quotients and negation that nothing rearranges.

TVM's simplifier works with floats as with integers: it takes ``(x + y) - y`` for ``x``, ``x - x``
and ``x * 0`` for 0 and ``x + 1 + 2`` for ``x + 3``. Operators that are apart in the graph meet in
one expression once their kernels are fused. So the result of each operator, its right operand and
its constants pass through their bits: the simplifier looks behind none of them, and LLVM, which
keeps to IEEE arithmetic, removes all of it. Results and right operands go by integers of different
signs, so that both sides of a difference are never the same expression.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax, te, tirx
from tvm.ir import Call, Expr, GenericConst
from tvm.relax.transform.legalize_ops.common import LegalizeFunc

from tvmbridge.legalize.broadcast import ELEMENTWISE, emit_broadcast
from tvmbridge.legalize.functions import FLOATS, HALF
from tvmbridge.legalize.lets import constant, dtype_of

Binary = Callable[[Expr, Expr], Expr]

_WIDTH = {"float32": 32, "float64": 64}


def opaque(value: Expr, *, sign: str = "int") -> Expr:
    """``value`` of float32 or float64, in a form that the simplifier does not look into."""
    dtype = dtype_of(value)
    return tirx.reinterpret(dtype, tirx.reinterpret(f"{sign}{_WIDTH[dtype]}", value))


def _exactly(function: Binary, a: Expr, b: Expr) -> Expr:
    """``function`` of two floats of one dtype; halves compute in float32."""
    dtype = dtype_of(a)
    wide = "float32" if dtype in HALF else dtype
    left, right = (tirx.Cast(wide, x) if wide != dtype else x for x in (a, b))
    if isinstance(left, tirx.FloatImm):
        left = opaque(left)
    result = opaque(function(left, opaque(right, sign="uint")))
    return tirx.Cast(dtype, result) if wide != dtype else result


def _number(arg: Expr, dtype: str) -> Expr | None:
    """A 0-d constant as an immediate; None for anything else."""
    if isinstance(arg, GenericConst) and not arg.value.shape and dtype not in HALF:
        return constant(arg.value.numpy().item(), dtype)
    return None


def arithmetic(function: Binary, name: str, others: LegalizeFunc) -> LegalizeFunc:
    """The legalisation of an operator of two floats; ``others`` is that of all other dtypes."""

    def legalize(bb: relax.BlockBuilder, call: Call) -> Expr:
        dtype = str(call.ty.dtype.dtype)
        if dtype not in FLOATS:
            return others(bb, call)
        numbers = [_number(arg, dtype) for arg in call.args]
        tensors = [arg if n is None else None for arg, n in zip(call.args, numbers, strict=True)]

        def element(sides: list[Expr | None]) -> Expr:
            a, b = (e if n is None else n for n, e in zip(numbers, sides, strict=True))
            return _exactly(function, a, b)

        return emit_broadcast(bb, call, tensors, element, f"T_{name}", name)

    return legalize


def negative(others: LegalizeFunc) -> LegalizeFunc:
    """The legalisation of negation: the sign bit of a float turns, that of a zero too."""

    def legalize(bb: relax.BlockBuilder, call: Call) -> Expr:
        dtype = str(call.ty.dtype.dtype)
        if dtype not in _WIDTH:
            return others(bb, call)
        width = _WIDTH[dtype]
        sign = constant(-(2 ** (width - 1)), f"int{width}")

        def compute(x: te.Tensor) -> te.Tensor:
            def element(*i: Expr) -> Expr:
                return tirx.reinterpret(dtype, tirx.reinterpret(f"int{width}", x(*i)) ^ sign)

            return te.compute(x.shape, element, name="T_negative")

        attrs = {"op_pattern": ELEMENTWISE}
        return bb.call_te(
            compute, call.args[0], primfunc_name_hint="negative", primfunc_attrs=attrs
        )

    return legalize
