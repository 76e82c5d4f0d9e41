"""Converters of element-wise operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from tvm import relax

from tvmbridge.frontend.importer import Importer
from tvmbridge.frontend.limits import are_many_calls
from tvmbridge.frontend.registry import COMPUTED, FLOATS, NUMBERS, Declined, converts
from tvmbridge.legalize.powers import SHORT_EXPONENTS

aten = torch.ops.aten

Operand = fx.Node | int | float | bool


def result_dtype(node: fx.Node) -> torch.dtype:
    """Return the dtype of the result of ``node``."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _plain(relax_op: Callable[..., relax.Expr]) -> Callable[..., relax.Expr]:
    """Return a converter that casts the operands to the result's dtype and calls ``relax_op``."""

    def convert(ctx: Importer, node: fx.Node, *operands: Operand) -> relax.Expr:
        return relax_op(*(ctx.tensor(x, result_dtype(node)) for x in operands))

    return convert


for _overload, _op in (
    (aten.exp.default, relax.op.exp),
    (aten.log.default, relax.op.log),
    (aten.sqrt.default, relax.op.sqrt),
    (aten.rsqrt.default, relax.op.rsqrt),
    (aten.sin.default, relax.op.sin),
    (aten.cos.default, relax.op.cos),
    (aten.tanh.default, relax.op.tanh),
    (aten.sigmoid.default, relax.op.sigmoid),
    (aten.erf.default, relax.op.erf),
):
    converts(_overload, dtypes=COMPUTED)(_plain(_op))

for _overload, _op in (
    (aten.neg.default, relax.op.negative),
    (aten.abs.default, relax.op.abs),
    (aten.relu.default, relax.op.nn.relu),
    (aten.maximum.default, relax.op.maximum),
    (aten.minimum.default, relax.op.minimum),
):
    converts(_overload, dtypes=NUMBERS)(_plain(_op))

for _overload, _op in (
    (aten.floor.default, relax.op.floor),
    (aten.ceil.default, relax.op.ceil),
    (aten.trunc.default, relax.op.trunc),
    (aten.silu.default, relax.op.nn.silu),
):
    converts(_overload, dtypes=FLOATS)(_plain(_op))

converts(aten.div.Tensor, aten.div.Scalar)(_plain(relax.op.divide))


@converts(aten.reciprocal.default)
def _reciprocal(ctx: Importer, node: fx.Node, x: fx.Node) -> relax.Expr:
    dtype = result_dtype(node)
    return relax.op.divide(ctx.tensor(1, dtype), ctx.tensor(x, dtype))


@converts(aten.gelu.default, dtypes=FLOATS)
def _gelu(ctx: Importer, node: fx.Node, x: fx.Node, approximate: str = "none") -> relax.Expr:
    if approximate == "tanh":
        return relax.op.nn.gelu_tanh(ctx.value(x))
    return relax.op.nn.gelu(ctx.value(x))


@converts(aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, dtypes=NUMBERS)
def _add_sub(
    ctx: Importer, node: fx.Node, a: Operand, b: Operand, alpha: int | float = 1
) -> relax.Expr:
    dtype = result_dtype(node)
    subtracts = node.target in (aten.sub.Tensor, aten.sub.Scalar)
    if subtracts and alpha == -(2**63):
        raise Declined("the least integer as alpha, which PyTorch negates to itself")
    right = ctx.tensor(b, dtype)
    if alpha != 1:
        right = ctx.emit(relax.op.multiply(right, ctx.tensor(alpha, dtype)))
    op = relax.op.subtract if subtracts else relax.op.add
    return op(ctx.tensor(a, dtype), right)


@converts(aten.rsub.Scalar, aten.rsub.Tensor, dtypes=NUMBERS)
def _rsub(
    ctx: Importer, node: fx.Node, a: Operand, b: Operand, alpha: int | float = 1
) -> relax.Expr:
    if alpha != 1:
        raise Declined("rsub with alpha")
    dtype = result_dtype(node)
    return relax.op.subtract(ctx.tensor(b, dtype), ctx.tensor(a, dtype))


@converts(aten.mul.Tensor, aten.mul.Scalar)
def _mul(ctx: Importer, node: fx.Node, a: Operand, b: Operand) -> relax.Expr:
    dtype = result_dtype(node)
    if dtype is torch.bool:
        return relax.op.logical_and(ctx.tensor(a, dtype), ctx.tensor(b, dtype))
    return relax.op.multiply(ctx.tensor(a, dtype), ctx.tensor(b, dtype))


@converts(aten.pow.Tensor_Scalar, dtypes=FLOATS)
def _pow(ctx: Importer, node: fx.Node, x: fx.Node, exponent: int | float) -> relax.Expr:
    value = ctx.value(x)
    if exponent == 1:
        return value
    if exponent == 0.5:
        return relax.op.sqrt(value)
    if exponent in SHORT_EXPONENTS:
        return relax.op.power(value, ctx.tensor(float(exponent), result_dtype(node)))
    if are_many_calls(node):
        raise Declined("many powers without a short form, for which PyTorch has vectors")
    return ctx.compiled_call(node)


@converts(aten._to_copy.default)
def _to_copy(ctx: Importer, node: fx.Node, x: fx.Node, **kwargs: Any) -> relax.Expr:
    if set(kwargs) - {"dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format"}:
        raise Declined("an unknown argument")
    if node.meta["val"].device != x.meta["val"].device:
        raise Declined("a copy between devices")
    return ctx.tensor(x, result_dtype(node))
