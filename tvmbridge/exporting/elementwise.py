"""Compute element-wise operators in forms that the frontend leaves to PyTorch's kernels.

The forms are arithmetic of narrow integers, remainders, shifts, and functions of the C library.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from tvm import relax, tirx
from tvm.ir import Call, Expr

from tvmbridge.legalize.arithmetic import opaque
from tvmbridge.legalize.aten.arguments import Arguments
from tvmbridge.legalize.broadcast import emit_broadcast
from tvmbridge.legalize.lets import Lets, constant, dtype_of
from tvmbridge.passes.base import dtype_of as dtype_of_tensor
from tvmbridge.passes.base import shape_of

Spell = Callable[[relax.BlockBuilder, Call, Arguments], Expr | None]
_NARROW = ("int8", "int16", "uint8", "bool")
_HALVES = ("float16", "bfloat16")
# The dtypes of values in loops: TVM's simplifier is given none that wrap around otherwise.
_WIDE = {**dict.fromkeys(_NARROW, "int32"), **dict.fromkeys(_HALVES, "float32")}


def elementwise(function: Callable[..., Expr], *operands: str, compares: bool = False) -> Spell:
    """Return a function that computes ``function`` of broadcast operands, element by element.

    Args:
        compares: whether the result is a bool, and operands have their common dtype; otherwise
            they have the result's dtype.
    """

    def spell(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr | None:
        values = [arguments[name] for name in operands]
        if not _is_plain(call, values):
            return None
        result = dtype_of_tensor(call)
        common = _common(values) if compares else result
        wide = _WIDE.get(common, common)
        numbers = [v for v in values if not isinstance(v, Expr)]
        if not all(_holds(common, number) for number in numbers):
            return None

        def element(elements: list[Expr | None]) -> Expr:
            sides = [
                constant(v, wide) if e is None else _cast(_cast(e, common), wide)
                for v, e in zip(values, elements, strict=True)
            ]
            value = function(*sides)
            return value if compares else _cast(_kept(value), result)

        tensors = [v if isinstance(v, Expr) else None for v in values]
        name = arguments.op.split(".")[1].strip("_")
        return emit_broadcast(bb, call, tensors, element, f"T_{name}", name)

    return spell


def _is_plain(call: Call, values: list[Any]) -> bool:
    """Whether shapes are static and not empty, and operands are tensors and numbers."""
    shapes = [shape_of(v) for v in (call, *values) if isinstance(v, Expr)]
    if any(shape is None or not prod(shape) for shape in shapes):
        return False
    return all(isinstance(v, Expr | bool | int | float) for v in values)


def _common(values: list[Any]) -> str:
    """Return the dtype to which PyTorch promotes two operands."""
    metas = [
        torch.empty(shape_of(v) or (), dtype=getattr(torch, dtype_of_tensor(v)), device="meta")
        if isinstance(v, Expr)
        else v
        for v in values
    ]
    return str(torch.result_type(*metas)).removeprefix("torch.")


def _holds(dtype: str, number: float) -> bool:
    """Whether ``dtype`` has the number."""
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return number in (0, 1)
    if kind.is_floating_point:
        return True
    return number == int(number) and torch.iinfo(kind).min <= number <= torch.iinfo(kind).max


def _kept(value: Expr) -> Expr:
    """Return a value that TVM's simplifier does not rearrange."""
    return opaque(value) if dtype_of(value) in ("int32", "int64", "float32", "float64") else value


def _cast(value: Expr, dtype: str) -> Expr:
    have = dtype_of(value)
    if have == dtype:
        return value
    if dtype == "bool":
        return tirx.NE(value, constant(0, have))
    if "float" in have and dtype in _NARROW:
        # As PyTorch's kernels do: the conversion is to int32, whose low bits are kept.
        return tirx.Cast(dtype, tirx.Cast("int32", value))
    return tirx.Cast(dtype, value)


def _remainder(a: Expr, b: Expr) -> Expr:
    """Return the remainder of two floats with the sign of ``b``, as Python's ``%``."""
    lets, dtype = Lets(), dtype_of(a)
    zero, name = constant(0.0, dtype), "fmodf" if dtype == "float32" else "fmod"
    b = lets.bind(opaque(b, sign="uint"), "b")
    rest = lets.bind(opaque(tirx.call_pure_extern(dtype, name, a, b)), "rest")
    other = tirx.Or(tirx.And(b < zero, rest > zero), tirx.And(b > zero, rest < zero))
    return lets.close(tirx.Select(other, rest + b, rest))


def _remainder_of(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr | None:
    """Return a remainder.

    Return None for integers divided by a tensor, because the tensor may have zeros.
    """
    divisor = arguments["other"]
    if "float" in dtype_of_tensor(call):
        return elementwise(_remainder, "self", "other")(bb, call, arguments)
    dtype = dtype_of_tensor(call)
    if isinstance(divisor, Expr) or not 0 < abs(divisor) < 2**31 or not _holds(dtype, divisor):
        return None

    def remainder(a: Expr) -> Expr:
        size = constant(abs(int(divisor)), dtype_of(a))
        rest = tirx.floormod(a, size)
        if divisor > 0:
            return rest
        return tirx.Select(rest.equal(constant(0, dtype_of(a))), rest, rest - size)

    return elementwise(remainder, "self")(bb, call, arguments)


def _remainder_of_floats(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr | None:
    if "float" not in dtype_of_tensor(call):
        return None
    return elementwise(_libm("fmod"), "self", "other")(bb, call, arguments)


def _shift(function: Callable[[Expr, Expr], Expr]) -> Spell:
    def spell(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr | None:
        bits = arguments["other"]
        dtype = dtype_of_tensor(call)
        width = 8 * getattr(torch, dtype).itemsize
        if not isinstance(bits, int) or not 0 <= bits < width or dtype == "bool":
            return None
        return elementwise(function, "self", "other")(bb, call, arguments)

    return spell


def _with_alpha(function: Callable[[Expr, Expr], Expr]) -> Spell:
    def spell(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr | None:
        if dtype_of_tensor(call) == "bool":
            return None
        return elementwise(lambda a, b, alpha: function(a, b * alpha), "self", "other", "alpha")(
            bb, call, arguments
        )

    return spell


def _product(a: Expr, b: Expr) -> Expr:
    return a * b


def _libm(name: str) -> Callable[..., Expr]:
    """Return a function of the C library, computed in float64."""

    def function(*values: Expr) -> Expr:
        dtype = dtype_of(values[0])
        wide = [v if dtype == "float64" else tirx.Cast("float64", v) for v in values]
        found = tirx.call_pure_extern("float64", name, *wide)
        return found if dtype == "float64" else tirx.Cast(dtype, found)

    return function


def _copied(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr | None:
    return elementwise(lambda x: x, "self")(bb, call, arguments)


def _chosen(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr | None:
    condition = arguments["condition"]
    if dtype_of_tensor(condition) != "bool":
        return None
    return elementwise(
        lambda c, a, b: tirx.Select(tirx.NE(c, constant(0, dtype_of(c))), a, b),
        "condition",
        "self",
        "other",
    )(bb, call, arguments)


_COMPARISONS: dict[str, Callable[[Expr, Expr], Expr]] = {
    "eq": tirx.EQ, "ne": tirx.NE, "lt": tirx.LT, "le": tirx.LE, "gt": tirx.GT, "ge": tirx.GE,
}  # fmt: skip
_ARITHMETIC: dict[str, Spell] = {
    "add": _with_alpha(lambda a, b: a + b),
    "sub": _with_alpha(lambda a, b: a - b),
    "rsub": _with_alpha(lambda a, b: b - a),
}
_BITS: dict[str, Callable[[Expr, Expr], Expr]] = {
    "and": tirx.bitwise_and, "or": tirx.bitwise_or, "xor": tirx.bitwise_xor,
}  # fmt: skip
# Names in PyTorch of functions of the C library.
_FUNCTIONS = {
    "lgamma": "lgamma", "erfc": "erfc", "exp2": "exp2", "log2": "log2", "log10": "log10",
    "tan": "tan", "sinh": "sinh", "round": "nearbyint", "expm1": "expm1",
}  # fmt: skip

ELEMENTWISE: dict[str, Spell] = {
    **{
        f"aten.{name}.{form}": elementwise(function, "self", "other", compares=True)
        for name, function in _COMPARISONS.items()
        for form in ("Tensor", "Scalar")
    },
    **{f"aten.{n}.{form}": s for n, s in _ARITHMETIC.items() for form in ("Tensor", "Scalar")},
    **{f"aten.{n}.default": elementwise(_libm(f), "self") for n, f in _FUNCTIONS.items()},
    **{f"aten.mul.{form}": elementwise(_product, "self", "other") for form in ("Tensor", "Scalar")},
    **{f"aten.remainder.{form}": _remainder_of for form in ("Tensor", "Scalar")},
    **{
        f"aten.bitwise_{name}.{form}": elementwise(function, "self", "other")
        for name, function in _BITS.items()
        for form in ("Tensor", "Scalar")
    },
    **{f"aten.__lshift__.{f}": _shift(lambda a, b: a << b) for f in ("Tensor", "Scalar")},
    **{f"aten.__rshift__.{f}": _shift(lambda a, b: a >> b) for f in ("Tensor", "Scalar")},
    "aten.maximum.default": elementwise(tirx.max, "self", "other"),
    "aten.minimum.default": elementwise(tirx.min, "self", "other"),
    "aten.hypot.default": elementwise(_libm("hypot"), "self", "other"),
    "aten.fmod.Tensor": _remainder_of_floats,
    "aten.copysign.Tensor": elementwise(_libm("copysign"), "self", "other"),
    "aten.copysign.Scalar": elementwise(_libm("copysign"), "self", "other"),
    "aten._to_copy.default": _copied,
    "aten.where.self": _chosen,
}
"""Functions that build the Relax of an operator; None for arguments that they do not support."""
