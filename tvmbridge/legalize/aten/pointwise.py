"""Loops for element-wise ATen operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from tvm import relax, tirx
from tvm.ir import Call, Expr

from tvmbridge.legalize.arithmetic import opaque
from tvmbridge.legalize.aten.arguments import Arguments, Compile
from tvmbridge.legalize.broadcast import emit_broadcast
from tvmbridge.legalize.float32 import copy_sign
from tvmbridge.legalize.float32_inverse import atan2
from tvmbridge.legalize.functions import FLOATS, FUNCTIONS, HALF
from tvmbridge.legalize.lets import Lets, constant, dtype_of

Scalar = Callable[..., Expr]

_INTEGERS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}


def _computed(dtype: str) -> str:
    return "float32" if dtype in HALF else dtype


def _held(number: int | float, dtype: str) -> int | float:
    """Return ``number`` in the range of ``dtype``: a float becomes infinite, an integer wraps."""
    if dtype in _INTEGERS and isinstance(number, int):
        half = 2 ** (_INTEGERS[dtype] - 1)
        return (number + half) % (2 * half) - half
    if dtype in FLOATS and abs(number) > torch.finfo(getattr(torch, dtype)).max:
        return math.copysign(math.inf, number)
    return number


def pointwise(function: Scalar, *operands: str) -> Compile:
    """Return a function that emits loops which apply ``function`` to the call's operands.

    ``operands`` are the names of arguments, which are numbers or tensors. The loops compute in the
    dtype of the result, or in float32 if that is half precision.
    """

    def compile_call(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
        result = str(call.ty.dtype.dtype)
        wide = _computed(result)
        values = [arguments[name] for name in operands]
        tensors = [v if isinstance(v, Expr) else None for v in values]

        def element(elements: list[Expr | None]) -> Expr:
            sides = [
                constant(_held(v, result), result) if e is None else tirx.Cast(result, e)
                for v, e in zip(values, elements, strict=True)
            ]
            value = function(*[tirx.Cast(wide, side) for side in sides])
            value = opaque(value) if wide in FLOATS else value
            return tirx.Cast(result, value) if wide != result else value

        name = arguments.op.split(".")[1]
        return emit_broadcast(bb, call, tensors, element, f"T_{name}", name)

    return compile_call


def _angle(y: Expr, x: Expr) -> Expr:
    if dtype_of(y) == "float64":
        return tirx.call_pure_extern("float64", "atan2", y, x)
    return atan2(y, x)


def _remainder(a: Expr, b: Expr) -> Expr:
    """Return the remainder of ``a`` divided by ``b``, with the sign of ``a``."""
    dtype = dtype_of(a)
    if dtype not in FLOATS:
        return tirx.truncmod(a, b)
    return tirx.call_pure_extern(dtype, "fmodf" if dtype == "float32" else "fmod", a, b)


def _power(a: Expr, b: Expr) -> Expr:
    dtype = dtype_of(a)
    return tirx.call_pure_extern(dtype, "powf" if dtype == "float32" else "pow", a, b)


def _elu(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    alpha, scale, inner = (float(arguments[n]) for n in ("alpha", "scale", "input_scale"))

    def function(x: Expr) -> Expr:
        lets, dtype = Lets(), dtype_of(x)
        x, zero = lets.bind(x, "x"), constant(0.0, dtype)
        low = lets.bind(tirx.Select(x > zero, zero, x), "low")
        bent = FUNCTIONS["expm1"](opaque(low * constant(inner, dtype)))
        # Opaque: TVM would simplify the product to 0 for an alpha of 0, although x may be NaN.
        negative = opaque(bent) * opaque(constant(alpha * scale, dtype), sign="uint")
        # A zero keeps its sign whatever alpha is.
        return lets.close(tirx.Select(x >= zero, x * constant(scale, dtype), negative))

    return pointwise(function, "self")(bb, call, arguments)


def _softplus(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    def function(x: Expr) -> Expr:
        lets, beta, scaled, is_large = _scaled(arguments, x)
        bent = opaque(FUNCTIONS["log1p"](opaque(FUNCTIONS["exp"](scaled))))
        return lets.close(tirx.Select(is_large, x, bent / beta))

    return pointwise(function, "self")(bb, call, arguments)


def _softplus_backward(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    def function(gradient: Expr, x: Expr) -> Expr:
        lets, _, scaled, is_large = _scaled(arguments, x)
        power = lets.bind(opaque(FUNCTIONS["exp"](scaled)), "power")
        slope = opaque(gradient * power) / opaque(power + constant(1.0, dtype_of(x)))
        return lets.close(tirx.Select(is_large, gradient, slope))

    return pointwise(function, "grad_output", "self")(bb, call, arguments)


def _scaled(arguments: Arguments, x: Expr) -> tuple[Lets, Expr, Expr, Expr]:
    """Return variables, ``beta``, ``x * beta``, and whether softplus is the identity there."""
    lets, dtype = Lets(), dtype_of(x)
    beta, threshold = (constant(float(arguments[n]), dtype) for n in ("beta", "threshold"))
    scaled = lets.bind(opaque(x * beta), "scaled")
    return lets, beta, scaled, scaled > threshold


def _divided(bb: relax.BlockBuilder, call: Call, arguments: Arguments) -> Expr:
    """Emit quotients that are rounded towards zero, or down."""
    down = arguments["rounding_mode"] == "floor"

    def function(a: Expr, b: Expr) -> Expr:
        if dtype_of(a) not in FLOATS:
            return tirx.floordiv(a, b) if down else tirx.truncdiv(a, b)
        return _floor_quotient(a, b) if down else tirx.trunc(tirx.div(a, opaque(b)))

    return pointwise(function, "self", "other")(bb, call, arguments)


def _signed(magnitude: Expr, sign: Expr) -> Expr:
    if dtype_of(sign) == "float64":
        return tirx.call_pure_extern("float64", "copysign", magnitude, sign)
    return copy_sign(magnitude, sign)


def _floor_quotient(a: Expr, b: Expr) -> Expr:
    """Return the quotient rounded down, from the exact remainder, as Python and PyTorch do."""
    lets, dtype = Lets(), dtype_of(a)
    a, b = lets.bind(opaque(a), "a"), lets.bind(opaque(b, sign="uint"), "b")
    zero, one = constant(0.0, dtype), constant(1.0, dtype)
    plain = lets.bind(opaque(a / b), "plain")
    rest = lets.bind(opaque(_remainder(a, b)), "rest")
    exact = lets.bind(opaque((a - rest) / b), "exact")
    below = tirx.And(rest < zero, b > zero)
    above = tirx.And(rest > zero, b < zero)
    lowered = lets.bind(tirx.Select(tirx.Or(below, above), opaque(exact - one), exact), "lowered")
    floor = lets.bind(tirx.floor(lowered), "floor")
    nearest = tirx.Select(opaque(lowered - floor) > constant(0.5, dtype), floor + one, floor)
    signed = _signed(zero, plain)
    value = lets.bind(tirx.Select(lowered.equal(zero), signed, nearest), "value")
    return lets.close(tirx.Select(b.equal(zero), plain, value))


def unary(name: str) -> Compile:
    """Return a function that emits loops for the function ``name`` in :data:`FUNCTIONS`."""
    return pointwise(FUNCTIONS[name], "self")


_BITWISE: dict[str, Any] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}

POINTWISE: dict[str, Compile] = {
    **{
        f"aten.{name}.default": unary(name)
        for name in ["log1p", "expm1", "cosh", "asinh", "acosh", "atanh", "asin", "acos", "atan"]
    },
    **{
        f"aten.bitwise_{name}.Scalar": pointwise(function, "self", "other")
        for name, function in _BITWISE.items()
    },
    "aten.atan2.default": pointwise(_angle, "self", "other"),
    "aten.fmod.Scalar": pointwise(_remainder, "self", "other"),
    "aten.fmod.Tensor": pointwise(_remainder, "self", "other"),
    "aten.pow.Scalar": pointwise(_power, "self", "exponent"),
    "aten.pow.Tensor_Scalar": pointwise(_power, "self", "exponent"),
    "aten.pow.Tensor_Tensor": pointwise(_power, "self", "exponent"),
    "aten.div.Tensor_mode": _divided,
    "aten.div.Scalar_mode": _divided,
    "aten.elu.default": _elu,
    "aten.softplus.default": _softplus,
    "aten.softplus_backward.default": _softplus_backward,
}
