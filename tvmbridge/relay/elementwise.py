"""Converters of element-wise operators."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from tvmbridge.relay.registry import ALL, FLOATS, INTEGERS, NUMBERS, ConverterFn, Refused, converts
from tvmbridge.relay.writer import Operand, Writer, dtype_of

aten = torch.ops.aten


def _unary(operator: str) -> ConverterFn:
    def convert(ctx: Writer, node: fx.Node, x: fx.Node) -> str:
        return ctx.call(operator, ctx.operand(x, dtype_of(node)))

    return convert


# The result has a float dtype; operands of other dtypes are cast to it.
_OF_FLOATS = {
    aten.exp.default: "exp",
    aten.log.default: "log",
    aten.log2.default: "log2",
    aten.log10.default: "log10",
    aten.sqrt.default: "sqrt",
    aten.rsqrt.default: "rsqrt",
    aten.sin.default: "sin",
    aten.cos.default: "cos",
    aten.tan.default: "tan",
    aten.sinh.default: "sinh",
    aten.cosh.default: "cosh",
    aten.asin.default: "asin",
    aten.acos.default: "acos",
    aten.atan.default: "atan",
    aten.asinh.default: "asinh",
    aten.acosh.default: "acosh",
    aten.atanh.default: "atanh",
    aten.tanh.default: "tanh",
    aten.sigmoid.default: "sigmoid",
    aten.erf.default: "erf",
}
for _overload, _name in _OF_FLOATS.items():
    converts(_overload)(_unary(_name))

for _overload, _name in (
    (aten.floor.default, "floor"),
    (aten.ceil.default, "ceil"),
    (aten.trunc.default, "trunc"),
):
    converts(_overload, dtypes=FLOATS)(_unary(_name))

for _overload, _name in ((aten.neg.default, "negative"), (aten.abs.default, "abs")):
    converts(_overload, dtypes=NUMBERS - {torch.uint8})(_unary(_name))

converts(aten.relu.default, dtypes=NUMBERS)(_unary("nn.relu"))
converts(aten.sign.default, dtypes=FLOATS)(_unary("sign"))
converts(aten.sgn.default, dtypes=FLOATS)(_unary("sign"))


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


@converts(aten.log1p.default, dtypes=frozenset({torch.float32}))
def _log1p(ctx: Writer, node: fx.Node, x: fx.Node) -> str:
    """Write log(1 + x), and near 0, where the sum loses digits, the first terms of its series."""
    dtype, value = dtype_of(node), ctx.value(x)
    series = ctx.number(-1 / 6, dtype)
    for coefficient in (1 / 5, -1 / 4, 1 / 3, -1 / 2, 1.0):
        series = ctx.call("multiply", value, series)
        series = ctx.call("add", series, ctx.number(coefficient, dtype))
    series = ctx.call("multiply", value, series)
    whole = ctx.call("log", ctx.call("add", value, ctx.number(1, dtype)))
    small = ctx.call("less", ctx.call("abs", value), ctx.number(0.05, dtype))
    return ctx.call("where", small, series, whole)


@converts(aten.expm1.default, dtypes=frozenset({torch.float32}))
def _expm1(ctx: Writer, node: fx.Node, x: fx.Node) -> str:
    """Write exp(x) - 1, and near 0, where the difference loses digits, the series' first terms."""
    dtype, value = dtype_of(node), ctx.value(x)
    series = ctx.number(1 / 720, dtype)
    for coefficient in (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0):
        series = ctx.call("multiply", value, series)
        series = ctx.call("add", series, ctx.number(coefficient, dtype))
    series = ctx.call("multiply", value, series)
    whole = ctx.call("subtract", ctx.call("exp", value), ctx.number(1, dtype))
    small = ctx.call("less", ctx.call("abs", value), ctx.number(0.05, dtype))
    return ctx.call("where", small, series, whole)


@converts(aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, dtypes=NUMBERS)
def _add_sub(ctx: Writer, node: fx.Node, a: Operand, b: Operand, alpha: float = 1) -> str:
    subtracts = node.target in (aten.sub.Tensor, aten.sub.Scalar)
    return _sum(ctx, "subtract" if subtracts else "add", dtype_of(node), (a, b), alpha)


@converts(aten.rsub.Scalar, aten.rsub.Tensor, dtypes=NUMBERS)
def _rsub(ctx: Writer, node: fx.Node, a: Operand, b: Operand, alpha: float = 1) -> str:
    return _sum(ctx, "subtract", dtype_of(node), (b, a), alpha)


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


@converts(aten.div.Tensor, aten.div.Scalar)
def _div(ctx: Writer, node: fx.Node, a: Operand, b: Operand) -> str:
    dtype = dtype_of(node)
    return ctx.call("divide", ctx.operand(a, dtype), ctx.operand(b, dtype))


@converts(aten.div.Tensor_mode, aten.div.Scalar_mode, dtypes=NUMBERS - {torch.uint8})
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


@converts(aten.floor_divide.default, dtypes=INTEGERS - {torch.uint8})
def _floor_divide(ctx: Writer, node: fx.Node, a: Operand, b: Operand) -> str:
    dtype = dtype_of(node)
    return ctx.call("floor_divide", ctx.operand(a, dtype), ctx.operand(b, dtype))


@converts(aten.remainder.Tensor, aten.remainder.Scalar, dtypes=INTEGERS - {torch.uint8})
def _remainder(ctx: Writer, node: fx.Node, a: Operand, b: Operand) -> str:
    dtype = dtype_of(node)
    return ctx.call("floor_mod", ctx.operand(a, dtype), ctx.operand(b, dtype))


@converts(aten.fmod.Tensor, aten.fmod.Scalar, dtypes=INTEGERS - {torch.uint8})
def _fmod(ctx: Writer, node: fx.Node, a: Operand, b: Operand) -> str:
    dtype = dtype_of(node)
    return ctx.call("trunc_mod", ctx.operand(a, dtype), ctx.operand(b, dtype))


@converts(aten.maximum.default, aten.minimum.default, dtypes=NUMBERS)
def _extremum(ctx: Writer, node: fx.Node, a: Operand, b: Operand) -> str:
    dtype = dtype_of(node)
    name = "maximum" if node.target is aten.maximum.default else "minimum"
    return ctx.call(name, ctx.operand(a, dtype), ctx.operand(b, dtype))


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


@converts(aten.pow.Tensor_Tensor, aten.pow.Scalar, dtypes=FLOATS)
def _pow_of_tensors(ctx: Writer, node: fx.Node, a: Operand, b: Operand) -> str:
    dtype = dtype_of(node)
    return ctx.call("power", ctx.operand(a, dtype), ctx.operand(b, dtype))


@converts(aten.clamp.default, dtypes=NUMBERS)
def _clamp(
    ctx: Writer,
    node: fx.Node,
    x: fx.Node,
    min: float | None = None,
    max: float | None = None,
) -> str:
    return _clipped(ctx, node, x, min, max)


@converts(aten.hardtanh.default, dtypes=NUMBERS)
def _hardtanh(
    ctx: Writer, node: fx.Node, x: fx.Node, min_val: float = -1, max_val: float = 1
) -> str:
    return _clipped(ctx, node, x, min_val, max_val)


def _clipped(ctx: Writer, node: fx.Node, x: fx.Node, low: float | None, high: float | None) -> str:
    dtype, value = dtype_of(node), ctx.operand(x, dtype_of(node))
    if low is not None and high is not None and -math.inf < low <= high < math.inf:
        return ctx.call("clip", value, a_min=float(low), a_max=float(high))
    if low is not None:
        value = ctx.call("maximum", value, ctx.number(low, dtype))
    return value if high is None else ctx.call("minimum", value, ctx.number(high, dtype))


@converts(aten.clamp.Tensor, dtypes=NUMBERS)
def _clamp_tensor(
    ctx: Writer,
    node: fx.Node,
    x: fx.Node,
    min: fx.Node | None = None,
    max: fx.Node | None = None,
) -> str:
    dtype = dtype_of(node)
    value = ctx.operand(x, dtype)
    if min is not None:
        value = ctx.call("maximum", value, ctx.operand(min, dtype))
    return value if max is None else ctx.call("minimum", value, ctx.operand(max, dtype))


@converts(aten.clamp_min.default, dtypes=NUMBERS)
def _clamp_min(ctx: Writer, node: fx.Node, x: fx.Node, bound: float) -> str:
    dtype = dtype_of(node)
    return ctx.call("maximum", ctx.operand(x, dtype), ctx.number(bound, dtype))


@converts(aten.clamp_max.default, dtypes=NUMBERS)
def _clamp_max(ctx: Writer, node: fx.Node, x: fx.Node, bound: float) -> str:
    dtype = dtype_of(node)
    return ctx.call("minimum", ctx.operand(x, dtype), ctx.number(bound, dtype))


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
