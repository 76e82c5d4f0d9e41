"""Converters of comparisons, of logical and bitwise operators, and of selections by a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from tvm import relax

from tvmbridge.frontend.elementwise import Operand, result_dtype
from tvmbridge.frontend.importer import Importer
from tvmbridge.frontend.registry import COMPUTED, Declined, converts

aten = torch.ops.aten


def common_dtype(a: Operand, b: Operand) -> torch.dtype:
    """Return the dtype that ATen promotes two operands to."""
    fakes = [x.meta["val"] if isinstance(x, fx.Node) else x for x in (a, b)]
    return torch.result_type(*fakes)


Binary = Callable[[relax.Expr, relax.Expr], relax.Expr]

_COMPARISONS: dict[Any, Binary] = {
    overload: compare
    for name, compare in (
        ("eq", relax.op.equal),
        ("ne", relax.op.not_equal),
        ("lt", relax.op.less),
        ("le", relax.op.less_equal),
        ("gt", relax.op.greater),
        ("ge", relax.op.greater_equal),
    )
    for overload in (getattr(aten, name).Tensor, getattr(aten, name).Scalar)
}


@converts(*_COMPARISONS, dtypes=COMPUTED)
def _compare(ctx: Importer, node: fx.Node, a: Operand, b: Operand) -> relax.Expr:
    dtype = common_dtype(a, b)
    if dtype is torch.bool:
        # Booleans are compared as the numbers 0 and 1.
        sides = (ctx.cast(ctx.tensor(x, dtype), dtype, torch.int32) for x in (a, b))
        return _COMPARISONS[node.target](*sides)
    return _COMPARISONS[node.target](ctx.tensor(a, dtype), ctx.tensor(b, dtype))


# Relax's operators for booleans, and for integers where ATen has one operator for both.
_LOGIC: dict[Any, tuple[Binary, Binary | None]] = {
    aten.logical_and.default: (relax.op.logical_and, None),
    aten.logical_or.default: (relax.op.logical_or, None),
    aten.logical_xor.default: (relax.op.logical_xor, None),
    aten.bitwise_and.Tensor: (relax.op.logical_and, relax.op.bitwise_and),
    aten.bitwise_or.Tensor: (relax.op.logical_or, relax.op.bitwise_or),
    aten.bitwise_xor.Tensor: (relax.op.logical_xor, relax.op.bitwise_xor),
}


@converts(*_LOGIC)
def _logical(ctx: Importer, node: fx.Node, a: Operand, b: Operand) -> relax.Expr:
    of_bools, of_integers = _LOGIC[node.target]
    dtype = torch.bool if of_integers is None else common_dtype(a, b)
    chosen = of_bools if dtype is torch.bool or of_integers is None else of_integers
    return chosen(ctx.tensor(a, dtype), ctx.tensor(b, dtype))


@converts(aten.logical_not.default)
def _logical_not(ctx: Importer, node: fx.Node, x: fx.Node) -> relax.Expr:
    return relax.op.logical_not(ctx.tensor(x, torch.bool))


@converts(aten.bitwise_not.default)
def _bitwise_not(ctx: Importer, node: fx.Node, x: fx.Node) -> relax.Expr:
    if result_dtype(node) is not torch.bool:
        return relax.op.bitwise_not(ctx.value(x))
    return relax.op.logical_not(ctx.value(x))


@converts(aten.where.self)
def _where(ctx: Importer, node: fx.Node, condition: fx.Node, a: Operand, b: Operand) -> relax.Expr:
    dtype = result_dtype(node)
    if condition.meta["val"].dtype is not torch.bool:
        raise Declined("where with a condition that is not boolean")
    return relax.op.where(ctx.value(condition), ctx.tensor(a, dtype), ctx.tensor(b, dtype))


@converts(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(
    ctx: Importer, node: fx.Node, x: fx.Node, mask: fx.Node, value: Operand
) -> relax.Expr:
    dtype = result_dtype(node)
    if mask.meta["val"].dtype is not torch.bool:
        raise Declined("masked_fill with a mask that is not boolean")
    return relax.op.where(ctx.value(mask), ctx.tensor(value, dtype), ctx.tensor(x, dtype))
