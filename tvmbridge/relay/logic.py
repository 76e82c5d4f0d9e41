"""Converters of comparisons, of operators on booleans and bits, and of selections."""

from __future__ import annotations

import torch
from torch import fx

from tvmbridge.relay.registry import ALL, FLOATS, INTEGERS, ConverterFn, converts
from tvmbridge.relay.writer import Operand, Writer, dtype_of

aten = torch.ops.aten

_COMPARISONS = {
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
}


def common_dtype(*operands: Operand) -> torch.dtype:
    """Return the dtype that PyTorch promotes two operands to."""
    first, second = (o.meta["val"] if isinstance(o, fx.Node) else o for o in operands)
    return torch.result_type(first, second)


def _comparison(operator: str) -> ConverterFn:
    def convert(ctx: Writer, node: fx.Node, a: Operand, b: Operand) -> str:
        dtype = common_dtype(a, b)
        # Relay compares booleans only by equality.
        dtype = torch.int32 if dtype is torch.bool else dtype
        return ctx.call(operator, ctx.operand(a, dtype), ctx.operand(b, dtype))

    return convert


for _name, _operator in _COMPARISONS.items():
    _packet = getattr(aten, _name)
    converts(_packet.Tensor, _packet.Scalar)(_comparison(_operator))


def _logical(operator: str) -> ConverterFn:
    def convert(ctx: Writer, node: fx.Node, a: fx.Node, b: fx.Node) -> str:
        return ctx.call(operator, ctx.operand(a, torch.bool), ctx.operand(b, torch.bool))

    return convert


for _overload, _operator in (
    (aten.logical_and.default, "logical_and"),
    (aten.logical_or.default, "logical_or"),
    (aten.logical_xor.default, "not_equal"),
):
    converts(_overload)(_logical(_operator))


@converts(aten.logical_not.default)
def _logical_not(ctx: Writer, node: fx.Node, x: fx.Node) -> str:
    return ctx.call("logical_not", ctx.operand(x, torch.bool))


_BITS = {
    "bitwise_and": ("logical_and", "bitwise_and"),
    "bitwise_or": ("logical_or", "bitwise_or"),
    "bitwise_xor": ("not_equal", "bitwise_xor"),
}


def _bitwise(of_bools: str, of_integers: str) -> ConverterFn:
    def convert(ctx: Writer, node: fx.Node, a: Operand, b: Operand) -> str:
        dtype = dtype_of(node)
        name = of_bools if dtype is torch.bool else of_integers
        return ctx.call(name, ctx.operand(a, dtype), ctx.operand(b, dtype))

    return convert


for _name, _pair in _BITS.items():
    _packet = getattr(aten, _name)
    converts(_packet.Tensor, _packet.Scalar, dtypes=INTEGERS | {torch.bool})(_bitwise(*_pair))


@converts(aten.bitwise_not.default, dtypes=INTEGERS | {torch.bool})
def _bitwise_not(ctx: Writer, node: fx.Node, x: fx.Node) -> str:
    name = "logical_not" if dtype_of(node) is torch.bool else "bitwise_not"
    return ctx.call(name, ctx.value(x))


@converts(aten.isnan.default, aten.isinf.default, dtypes=FLOATS | {torch.bool})
def _is_special(ctx: Writer, node: fx.Node, x: fx.Node) -> str:
    return ctx.call("isnan" if node.target is aten.isnan.default else "isinf", ctx.value(x))


@converts(aten.where.self, dtypes=ALL)
def _where(ctx: Writer, node: fx.Node, condition: fx.Node, a: Operand, b: Operand) -> str:
    dtype = dtype_of(node)
    return ctx.call(
        "where", ctx.operand(condition, torch.bool), ctx.operand(a, dtype), ctx.operand(b, dtype)
    )


@converts(aten.masked_fill.Scalar, aten.masked_fill.Tensor, dtypes=ALL)
def _masked_fill(ctx: Writer, node: fx.Node, x: fx.Node, mask: fx.Node, value: Operand) -> str:
    dtype = dtype_of(node)
    return ctx.call("where", ctx.value(mask), ctx.operand(value, dtype), ctx.value(x))
