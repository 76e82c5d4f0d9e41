"""Converters of element-wise operators."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from tvmbridge.relay.registry import ALL, FLOATS, INTEGERS, NUMBERS, ConverterFn, Refused, converts
from tvmbridge.relay.writer import Operand, Writer, dtype_of

aten = torch.ops.aten


def plain(operator: str) -> ConverterFn:
    """Return a converter of an operator that Relay has: operands are cast to the result's dtype."""

    def convert(ctx: Writer, node: fx.Node, *operands: Operand) -> str:
        return ctx.call(operator, *(ctx.operand(o, dtype_of(node)) for o in operands))

    return convert


_SIGNED = INTEGERS - {torch.uint8}
_SAME_NAMES = "exp log log2 log10 sqrt rsqrt sin cos tan sinh cosh asin acos atan asinh acosh atanh"
for _name in (*_SAME_NAMES.split(), "tanh", "sigmoid", "erf"):
    converts(getattr(aten, _name).default)(plain(_name))
for _operator, _dtypes, _overloads in (
    ("floor", FLOATS, (aten.floor.default,)),
    ("ceil", FLOATS, (aten.ceil.default,)),
    ("trunc", FLOATS, (aten.trunc.default,)),
    ("sign", FLOATS, (aten.sign.default, aten.sgn.default)),
    ("negative", FLOATS | _SIGNED, (aten.neg.default,)),
    ("abs", FLOATS | _SIGNED, (aten.abs.default,)),
    ("nn.relu", NUMBERS, (aten.relu.default,)),
    ("divide", ALL, (aten.div.Tensor, aten.div.Scalar)),
    ("floor_divide", _SIGNED, (aten.floor_divide.default,)),
    ("floor_mod", _SIGNED, (aten.remainder.Tensor, aten.remainder.Scalar)),
    ("trunc_mod", _SIGNED, (aten.fmod.Tensor, aten.fmod.Scalar)),
    ("maximum", NUMBERS, (aten.maximum.default,)),
    ("minimum", NUMBERS, (aten.minimum.default,)),
    ("power", FLOATS, (aten.pow.Tensor_Tensor, aten.pow.Scalar)),
):
    converts(*_overloads, dtypes=_dtypes)(plain(_operator))


@converts(aten.reciprocal.default)
def _reciprocal(ctx: Writer, node: fx.Node, x: fx.Node) -> str:
    dtype = dtype_of(node)
    return ctx.call("divide", ctx.number(1, dtype), ctx.operand(x, dtype))


@converts(aten.round.default, dtypes=FLOATS)
def _round(ctx: Writer, node: fx.Node, x: fx.Node) -> str:
    """Relay's own ``round`` takes halves away from zero; PyTorch takes them to even numbers."""
    dtype, value = dtype_of(node), ctx.value(x)
    half, below = ctx.number(0.5, dtype), ctx.call("floor", value)
    rest = ctx.call("subtract", value, below)
    halved = ctx.call("multiply", below, half)
    odd = ctx.call("not_equal", ctx.call("floor", halved), halved)
    tied = ctx.call("logical_and", ctx.call("equal", rest, half), odd)
    up = ctx.call("logical_or", ctx.call("greater", rest, half), tied)
    return ctx.call("add", below, ctx.cast(up, torch.bool, dtype))


@converts(aten.log1p.default, aten.expm1.default, dtypes=frozenset({torch.float32}))
def _beside_one(ctx: Writer, node: fx.Node, x: fx.Node) -> str:
    """Write log(1 + x) or exp(x) - 1; near 0, where the sum loses digits, as a Taylor series."""
    dtype, value = dtype_of(node), ctx.value(x)
    if node.target is aten.log1p.default:
        whole = ctx.call("log", ctx.call("add", value, ctx.number(1, dtype)))
        coefficients = (-1 / 6, 1 / 5, -1 / 4, 1 / 3, -1 / 2, 1.0)
    else:
        whole = ctx.call("subtract", ctx.call("exp", value), ctx.number(1, dtype))
        coefficients = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0)
    series = ctx.number(coefficients[0], dtype)
    for coefficient in coefficients[1:]:
        series = ctx.call("multiply", value, series)
        series = ctx.call("add", series, ctx.number(coefficient, dtype))
    series = ctx.call("multiply", value, series)
    small = ctx.call("less", ctx.call("abs", value), ctx.number(0.05, dtype))
    return ctx.call("where", small, series, whole)


@converts(aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar)
def _add_sub(ctx: Writer, node: fx.Node, a: Operand, b: Operand, alpha: float = 1) -> str:
    subtracts = node.target in (aten.sub.Tensor, aten.sub.Scalar)
    if dtype_of(node) is torch.bool:
        left, right = ctx.operand(a, torch.bool), ctx.operand(b, torch.bool)
        return ctx.call("logical_or", left, right) if alpha else left
    return _sum(ctx, "subtract" if subtracts else "add", dtype_of(node), (a, b), alpha)


def _sum(
    ctx: Writer, operator: str, dtype: torch.dtype, pair: tuple[Operand, Operand], alpha: float
) -> str:
    """Return a + alpha * b, or a - alpha * b."""
    a, b = pair
    right = ctx.operand(b, dtype)
    if alpha != 1:
        right = ctx.call("multiply", right, ctx.number(alpha, dtype))
    return ctx.call(operator, ctx.operand(a, dtype), right)


@converts(aten.mul.Tensor, aten.mul.Scalar)
def _mul(ctx: Writer, node: fx.Node, a: Operand, b: Operand) -> str:
    dtype = dtype_of(node)
    name = "logical_and" if dtype is torch.bool else "multiply"
    return ctx.call(name, ctx.operand(a, dtype), ctx.operand(b, dtype))


@converts(aten.div.Tensor_mode, aten.div.Scalar_mode, dtypes=FLOATS | _SIGNED)
def _div_mode(
    ctx: Writer, node: fx.Node, a: Operand, b: Operand, rounding_mode: str | None = None
) -> str:
    dtype = dtype_of(node)
    left, right = ctx.operand(a, dtype), ctx.operand(b, dtype)
    if rounding_mode is None:
        return ctx.call("divide", left, right)
    if not dtype.is_floating_point:
        name = "floor_divide" if rounding_mode == "floor" else "trunc_divide"
        return ctx.call(name, left, right)
    if rounding_mode == "floor":
        raise Refused("floats divided and rounded down, which Relay rounds twice")
    return ctx.call("trunc", ctx.call("divide", left, right))


@converts(aten.hypot.default, dtypes=FLOATS)
def _hypot(ctx: Writer, node: fx.Node, a: fx.Node, b: fx.Node) -> str:
    """Write the root of a sum of squares; squares of ratios do not overflow."""
    dtype = dtype_of(node)
    sides = [ctx.call("abs", ctx.operand(x, dtype)) for x in (a, b)]
    long, short = ctx.call("maximum", *sides), ctx.call("minimum", *sides)
    one, zero = ctx.number(1, dtype), ctx.number(0, dtype)
    divisor = ctx.call("where", ctx.call("equal", long, zero), one, long)
    ratio = ctx.call("divide", short, divisor)
    root = ctx.call("sqrt", ctx.call("add", ctx.call("multiply", ratio, ratio), one))
    return ctx.call("multiply", long, root)


@converts(aten.copysign.Tensor, dtypes=FLOATS)
def _copysign(ctx: Writer, node: fx.Node, a: fx.Node, b: fx.Node) -> str:
    """Write ``|a|`` with the sign of ``b``; the reciprocal of -0 is negative."""
    dtype = dtype_of(node)
    size, sign = ctx.call("abs", ctx.operand(a, dtype)), ctx.operand(b, dtype)
    zero, one = ctx.number(0, dtype), ctx.number(1, dtype)
    below = ctx.call("less", sign, zero)
    inverse = ctx.call("less", ctx.call("divide", one, sign), zero)
    negative = ctx.call("logical_or", below, inverse)
    return ctx.call("where", negative, ctx.call("negative", size), size)


@converts(aten.pow.Tensor_Scalar, dtypes=NUMBERS)
def _pow(ctx: Writer, node: fx.Node, x: fx.Node, exponent: int | float) -> str:
    dtype = dtype_of(node)
    value = ctx.operand(x, dtype)
    if exponent in (1, 2, 3, 4):
        return _product(ctx, value, int(exponent))
    if not dtype.is_floating_point:
        raise Refused(f"integers to the power of {exponent}")
    name = {0.5: "sqrt", -0.5: "rsqrt"}.get(float(exponent))
    if name is not None:
        return ctx.call(name, value)
    return ctx.call("power", value, ctx.number(exponent, dtype))


def _product(ctx: Writer, value: str, times: int) -> str:
    """Return a power as products: Relay warns of other powers of negative numbers."""
    if times == 1:
        return value
    square = ctx.call("multiply", value, value)
    if times == 2:
        return square
    return ctx.call("multiply", square, value if times == 3 else square)


@converts(aten.clamp.default, aten.clamp.Tensor, aten.clamp_min.default, dtypes=NUMBERS)
def _clamp(
    ctx: Writer,
    node: fx.Node,
    x: fx.Node,
    min: Operand | None = None,
    max: Operand | None = None,
) -> str:
    dtype, value = dtype_of(node), ctx.operand(x, dtype_of(node))
    numbers = isinstance(min, int | float) and isinstance(max, int | float)
    if numbers and -math.inf < min <= max < math.inf:  # type: ignore[operator]
        return ctx.call("clip", value, a_min=float(min), a_max=float(max))  # type: ignore[arg-type]
    if min is not None:
        value = ctx.call("maximum", value, ctx.operand(min, dtype))
    return value if max is None else ctx.call("minimum", value, ctx.operand(max, dtype))


@converts(aten.clamp_max.default, dtypes=NUMBERS)
def _clamp_max(ctx: Writer, node: fx.Node, x: fx.Node, bound: float) -> str:
    return _clamp(ctx, node, x, None, bound)


@converts(aten._to_copy.default, aten.to.dtype, dtypes=ALL)
def _to_copy(ctx: Writer, node: fx.Node, x: fx.Node, *_: Any, **named: Any) -> str:
    return ctx.operand(x, dtype_of(node))


@converts(
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten.contiguous.default,
    aten.dropout.default,
)
def _same(ctx: Writer, node: fx.Node, x: fx.Node, *_: Any, **named: Any) -> str:
    return ctx.value(x)
