"""Converters of matrix products."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from tvmbridge.relay.registry import FLOATS, converts
from tvmbridge.relay.writer import Writer, dtype_of, shape_of

aten = torch.ops.aten


@converts(aten.linear.default, dtypes=FLOATS)
def _linear(
    ctx: Writer, node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None = None
) -> str:
    shape, kernel = shape_of(x), shape_of(weight)
    kept = kernel[:-1]
    text = ctx.value(weight) if kept else ctx.reshape(ctx.value(weight), [1, kernel[-1]])
    units = kept[0] if kept else 1
    rows = _as(ctx, ctx.value(x), shape, [math.prod(shape[:-1]), shape[-1]])
    product = ctx.call("nn.dense", rows, text, units=units)
    if bias is not None and shape_of(bias) == (units,):
        product = ctx.call("nn.bias_add", product, ctx.value(bias), axis=1)
        bias = None
    product = _as(ctx, product, [math.prod(shape[:-1]), units], shape_of(node))
    return product if bias is None else ctx.call("add", product, ctx.value(bias))


def _as(ctx: Writer, text: str, have: Sequence[int], want: Sequence[int]) -> str:
    return text if tuple(have) == tuple(want) else ctx.reshape(text, want)


def _transposed_value(ctx: Writer, node: fx.Node) -> str:
    """Return the transpose of a matrix, by the operand of a transpose if the node is one."""
    if node.target in (aten.permute.default, aten.t.default, aten.transpose.int):
        return ctx.value(node.args[0])  # type: ignore[arg-type]
    return ctx.transpose(ctx.value(node), [1, 0])


def _dense(ctx: Writer, a: fx.Node, b: fx.Node) -> str:
    """Return the product of two matrices, as a dense layer whose weight is b transposed."""
    units = shape_of(b)[1]
    return ctx.call("nn.dense", ctx.value(a), _transposed_value(ctx, b), units=units)


@converts(aten.mm.default, dtypes=FLOATS)
def _mm(ctx: Writer, node: fx.Node, a: fx.Node, b: fx.Node) -> str:
    return _dense(ctx, a, b)


@converts(aten.addmm.default, dtypes=FLOATS)
def _addmm(
    ctx: Writer,
    node: fx.Node,
    bias: fx.Node,
    a: fx.Node,
    b: fx.Node,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> str:
    product = _scaled(ctx, _dense(ctx, a, b), alpha, dtype_of(node))
    if beta == 1 and shape_of(bias) == shape_of(node)[1:]:
        return ctx.call("nn.bias_add", product, ctx.value(bias), axis=1)
    if beta == 0:  # PyTorch does not read the bias then.
        return product
    return ctx.call("add", product, _scaled(ctx, ctx.value(bias), beta, dtype_of(node)))


def _scaled(ctx: Writer, text: str, factor: float, dtype: torch.dtype) -> str:
    return text if factor == 1 else ctx.call("multiply", text, ctx.number(factor, dtype))


@converts(aten.bmm.default, dtypes=FLOATS)
def _bmm(ctx: Writer, node: fx.Node, a: fx.Node, b: fx.Node) -> str:
    return batch_matmul(ctx, ctx.value(a), ctx.value(b))


def batch_matmul(ctx: Writer, a: str, b: str, *, transpose_b: bool = False) -> str:
    """Return the products of two batches of matrices."""
    return ctx.call("nn.batch_matmul", a, b, transpose_a=False, transpose_b=transpose_b)


@converts(aten.matmul.default, aten.dot.default, aten.vdot.default, aten.mv.default, dtypes=FLOATS)
def _matmul(ctx: Writer, node: fx.Node, a: fx.Node, b: fx.Node) -> str:
    left, right = shape_of(a), shape_of(b)
    if len(left) == len(right) == 2:
        return _dense(ctx, a, b)
    if len(left) > 2 and len(right) == 2:
        rows = ctx.reshape(ctx.value(a), [math.prod(left[:-1]), left[-1]])
        weight = _transposed_value(ctx, b)
        product = ctx.call("nn.dense", rows, weight, units=right[1])
        return ctx.reshape(product, shape_of(node))
    first = (1, *left) if len(left) == 1 else left
    second = (*right, 1) if len(right) == 1 else right
    batch = torch.broadcast_shapes(first[:-2], second[:-2])
    texts = (
        _batched(ctx, ctx.value(a), left, first, batch),
        _batched(ctx, ctx.value(b), right, second, batch),
    )
    return ctx.reshape(batch_matmul(ctx, *texts), shape_of(node))


def _batched(
    ctx: Writer, text: str, have: Sequence[int], want: Sequence[int], batch: Sequence[int]
) -> str:
    """Return an operand as one batch of matrices: broadcast, then flattened."""
    text = _as(ctx, text, have, want)
    whole = [*batch, *want[-2:]]
    text = ctx.broadcast(text, want, whole)
    return _as(ctx, text, whole, [math.prod(batch), *want[-2:]])
