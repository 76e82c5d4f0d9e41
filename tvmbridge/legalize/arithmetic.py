"""Legalization of arithmetic operators that keeps TVM from rearranging floating-point arithmetic.

TVM's simplifier treats floats like integers: it replaces ``(x + y) - y`` by ``x``, ``x - x`` and
``x * 0`` by 0, and ``x + 1 + 2`` by ``x + 3``. Fusion puts operators of different nodes into one
expression. So each operator's result, right operand and constants are reinterpreted as integers and
back. The simplifier does not look through that; LLVM, which keeps to IEEE arithmetic, removes it.
Results go through signed and right operands through unsigned integers, so that both sides of a
difference are never the same expression.

Integers of 32 and 64 bits wrap around in PyTorch. TVM and LLVM assume that they never do, and take
``x + 1 > x`` for true and ``x * 2 // 2`` for x. So integer results are reinterpreted as floats and
back.
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
_WRAPPING = {"int32": "float32", "int64": "float64"}


def opaque(value: Expr, *, sign: str = "int") -> Expr:
    """Return a number of 32 or 64 bits, reinterpreted twice, so that the simplifier keeps it.

    ``sign`` is the kind of integer that a float is reinterpreted as: ``"int"`` or ``"uint"``.
    """
    dtype = dtype_of(value)
    bits = _WRAPPING.get(dtype) or f"{sign}{_WIDTH[dtype]}"
    return tirx.reinterpret(dtype, tirx.reinterpret(bits, value))


def is_least(value: float, dtype: str) -> bool:
    """Whether a number is the least of an integer dtype, with which TVM and LLVM miscompute."""
    return dtype in _WRAPPING and value == int(tirx.min_value(dtype).value)


def _exactly(function: Binary, a: Expr, b: Expr) -> Expr:
    """Return ``function`` of two floats of one dtype; half precisions are computed in float32."""
    dtype = dtype_of(a)
    wide = "float32" if dtype in HALF else dtype
    left, right = (tirx.Cast(wide, x) if wide != dtype else x for x in (a, b))
    if isinstance(left, tirx.FloatImm):
        left = opaque(left)
    result = opaque(function(left, opaque(right, sign="uint")))
    return tirx.Cast(dtype, result) if wide != dtype else result


def _wrapping(function: Binary, a: Expr, b: Expr) -> Expr:
    """Return ``function`` of two integers of one dtype, wrapped around on overflow."""
    return opaque(function(a, b))


def _number(arg: Expr, dtype: str) -> Expr | None:
    """Return a 0-d constant as an immediate; None for anything else."""
    if isinstance(arg, GenericConst) and not arg.value.shape and dtype not in HALF:
        value = arg.value.numpy().item()
        return None if is_least(value, dtype) else constant(value, dtype)
    return None


def arithmetic(function: Binary, name: str, others: LegalizeFunc) -> LegalizeFunc:
    """Return the legalization of an operator of two operands; ``others`` is for other dtypes."""

    def legalize(bb: relax.BlockBuilder, call: Call) -> Expr:
        dtype = str(call.ty.dtype.dtype)
        if dtype not in FLOATS and dtype not in _WRAPPING:
            return others(bb, call)
        exactly = _wrapping if dtype in _WRAPPING else _exactly
        numbers = [_number(arg, dtype) for arg in call.args]
        tensors = [arg if n is None else None for arg, n in zip(call.args, numbers, strict=True)]

        def element(sides: list[Expr | None]) -> Expr:
            a, b = (e if n is None else n for n, e in zip(numbers, sides, strict=True))
            return exactly(function, a, b)

        return emit_broadcast(bb, call, tensors, element, f"T_{name}", name)

    return legalize


def negative(others: LegalizeFunc) -> LegalizeFunc:
    """Return the legalization of negation, which flips the sign bit of a float, also of a zero."""

    def element(x: Expr) -> Expr:
        dtype = dtype_of(x)
        if dtype in _WRAPPING:
            return opaque(constant(0, dtype) - x)
        width = _WIDTH[dtype]
        sign = constant(-(2 ** (width - 1)), f"int{width}")
        return tirx.reinterpret(dtype, tirx.reinterpret(f"int{width}", x) ^ sign)

    return _of_elements(element, "negative", (*_WIDTH, *_WRAPPING), others)


def absolute(others: LegalizeFunc) -> LegalizeFunc:
    """Return the legalization of absolute values, which keeps the least integer as it is."""

    def element(x: Expr) -> Expr:
        zero = constant(0, dtype_of(x))
        return tirx.Select(x < zero, opaque(zero - x), x)

    return _of_elements(element, "abs", tuple(_WRAPPING), others)


def cast(others: LegalizeFunc) -> LegalizeFunc:
    """Return the legalization of casts; an integer constant that does not fit wraps around."""

    def legalize(bb: relax.BlockBuilder, call: Call) -> Expr:
        arg, dtype = call.args[0], str(call.attrs.dtype)
        if isinstance(arg, GenericConst) and not arg.value.shape and "int" in dtype:
            value = arg.value.numpy()
            if value.dtype.kind in "iu":
                return relax.const(value.astype(dtype), dtype)
        return others(bb, call)

    return legalize


def _of_elements(
    element: Callable[[Expr], Expr], name: str, dtypes: tuple[str, ...], others: LegalizeFunc
) -> LegalizeFunc:
    """Return the legalization that applies ``element`` to each element of a tensor.

    ``others`` is the legalization of dtypes that are not in ``dtypes``.
    """

    def legalize(bb: relax.BlockBuilder, call: Call) -> Expr:
        if str(call.ty.dtype.dtype) not in dtypes:
            return others(bb, call)

        def compute(x: te.Tensor) -> te.Tensor:
            return te.compute(x.shape, lambda *i: element(x(*i)), name=f"T_{name}")

        attrs = {"op_pattern": ELEMENTWISE}
        return bb.call_te(compute, call.args[0], primfunc_name_hint=name, primfunc_attrs=attrs)

    return legalize
