"""Converters of matrix products. Operands of a product with a matrix are flattened to matrices."""

from __future__ import annotations

import torch
from torch import fx
from tvm import relax

from tvmbridge.frontend.importer import Importer
from tvmbridge.frontend.registry import FLOATS, HALVES, Declined, converts
from tvmbridge.frontend.shapes import shape_of

aten = torch.ops.aten


def _rows(ctx: Importer, x: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
    """Return ``x``, of shape ``shape``, as a matrix with all dimensions but the last flattened."""
    if len(shape) == 2:
        return x
    count = 1
    for extent in shape[:-1]:
        count *= extent
    return ctx.emit(relax.op.reshape(x, (count, shape[-1])))


@converts(aten.linear.default, dtypes=FLOATS | HALVES)
def _linear(
    ctx: Importer, node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None = None
) -> relax.Expr:
    if len(shape_of(weight)) != 2:
        raise Declined("linear with a weight that is not a matrix")
    rows = _rows(ctx, ctx.value(x), shape_of(x))
    transposed = ctx.emit(relax.op.permute_dims(ctx.value(weight), [1, 0]))
    product = ctx.emit(relax.op.matmul(rows, transposed))
    if bias is not None:
        product = ctx.emit(relax.op.add(product, ctx.value(bias)))
    return product if len(shape_of(node)) == 2 else relax.op.reshape(product, shape_of(node))


@converts(aten.mm.default, aten.bmm.default, dtypes=FLOATS | HALVES)
def _mm(ctx: Importer, node: fx.Node, a: fx.Node, b: fx.Node) -> relax.Expr:
    return relax.op.matmul(ctx.value(a), ctx.value(b))


@converts(aten.addmm.default, dtypes=FLOATS | HALVES)
def _addmm(
    ctx: Importer,
    node: fx.Node,
    bias: fx.Node,
    a: fx.Node,
    b: fx.Node,
    beta: int | float = 1,
    alpha: int | float = 1,
) -> relax.Expr:
    if beta != 1 or alpha != 1:
        raise Declined("addmm with alpha or beta")
    product = ctx.emit(relax.op.matmul(ctx.value(a), ctx.value(b)))
    return relax.op.add(product, ctx.value(bias))


@converts(aten.matmul.default, dtypes=FLOATS | HALVES)
def _matmul(ctx: Importer, node: fx.Node, a: fx.Node, b: fx.Node) -> relax.Expr:
    left, right = shape_of(a), shape_of(b)
    if len(left) < 2 or len(right) < 2:
        raise Declined("a product with a vector")
    if len(right) == 2:
        product = ctx.emit(relax.op.matmul(_rows(ctx, ctx.value(a), left), ctx.value(b)))
        return product if len(left) == 2 else relax.op.reshape(product, shape_of(node))
    if left[:-2] != right[:-2]:
        raise Declined("a product that broadcasts its batch")
    return relax.op.matmul(ctx.value(a), ctx.value(b))
