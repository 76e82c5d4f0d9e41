"""Converters of activations, clamps, sign, and tests for NaN and infinity."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from tvm import relax

from tvmbridge.frontend.elementwise import Operand, result_dtype
from tvmbridge.frontend.importer import Importer
from tvmbridge.frontend.registry import FLOATS, NUMBERS, Declined, converts

aten = torch.ops.aten

Bound = int | float | None


def _clip(ctx: Importer, node: fx.Node, x: fx.Node, low: Bound, high: Bound) -> relax.Expr:
    dtype = result_dtype(node)
    bounds = [b for b in (low, high) if b is not None]
    if any(math.isnan(b) for b in bounds):
        raise Declined("a bound that is NaN")
    if not dtype.is_floating_point:
        # Relax's clip takes floats, which do not hold all integers below 2^63.
        whole = [None if b is None else int(b) for b in (low, high)]
        return _between(ctx, ctx.tensor(x, dtype), dtype, *whole)
    edges = [-math.inf if low is None else float(low), math.inf if high is None else float(high)]
    if edges[0] > edges[1]:
        raise Declined("bounds in the wrong order")
    return relax.op.clip(ctx.tensor(x, dtype), *edges)


def _between(
    ctx: Importer, value: relax.Expr, dtype: torch.dtype, low: Any, high: Any
) -> relax.Expr:
    """Apply bounds, which are numbers or nodes, one after the other."""
    if low is not None:
        value = ctx.emit(relax.op.maximum(value, ctx.tensor(low, dtype)))
    if high is not None:
        value = ctx.emit(relax.op.minimum(value, ctx.tensor(high, dtype)))
    return value


@converts(aten.clamp.default, aten.clamp_min.default, dtypes=NUMBERS)
def _clamp(
    ctx: Importer, node: fx.Node, x: fx.Node, min: Bound = None, max: Bound = None
) -> relax.Expr:
    return _clip(ctx, node, x, min, max)


@converts(aten.clamp_max.default, dtypes=NUMBERS)
def _clamp_max(ctx: Importer, node: fx.Node, x: fx.Node, bound: Bound) -> relax.Expr:
    return _clip(ctx, node, x, None, bound)


@converts(aten.hardtanh.default, dtypes=FLOATS)
def _hardtanh(
    ctx: Importer, node: fx.Node, x: fx.Node, low: Bound = -1.0, high: Bound = 1.0
) -> relax.Expr:
    return _clip(ctx, node, x, low, high)


@converts(aten.clamp.Tensor, dtypes=NUMBERS)
def _clamp_by_tensors(
    ctx: Importer,
    node: fx.Node,
    x: fx.Node,
    low: fx.Node | None = None,
    high: fx.Node | None = None,
) -> relax.Expr:
    dtype = result_dtype(node)
    return _between(ctx, ctx.tensor(x, dtype), dtype, low, high)


@converts(aten.leaky_relu.default, dtypes=FLOATS)
def _leaky_relu(ctx: Importer, node: fx.Node, x: fx.Node, slope: int | float = 0.01) -> relax.Expr:
    value, dtype = ctx.value(x), result_dtype(node)
    positive = ctx.emit(relax.op.greater(value, ctx.tensor(0, dtype)))
    scaled = ctx.emit(relax.op.multiply(value, ctx.tensor(slope, dtype)))
    return relax.op.where(positive, value, scaled)


def _need_floats(x: fx.Node) -> None:
    if not x.meta["val"].is_floating_point():
        raise Declined("a test for NaN or infinity of booleans")


@converts(aten.isnan.default, dtypes=FLOATS | {torch.bool})
def _isnan(ctx: Importer, node: fx.Node, x: fx.Node) -> relax.Expr:
    _need_floats(x)
    return relax.op.not_equal(ctx.value(x), ctx.value(x))


@converts(aten.isinf.default, dtypes=FLOATS | {torch.bool})
def _isinf(ctx: Importer, node: fx.Node, x: fx.Node) -> relax.Expr:
    _need_floats(x)
    size = ctx.emit(relax.op.abs(ctx.value(x)))
    return relax.op.equal(size, ctx.tensor(math.inf, x.meta["val"].dtype))


@converts(aten.sign.default, aten.sgn.default, dtypes=NUMBERS)
def _sign(ctx: Importer, node: fx.Node, x: fx.Node) -> relax.Expr:
    value, dtype = ctx.value(x), result_dtype(node)
    zero, one, minus = (ctx.tensor(n, dtype) for n in (0, 1, -1))
    below = ctx.emit(relax.op.where(ctx.emit(relax.op.less(value, zero)), minus, zero))
    return relax.op.where(ctx.emit(relax.op.greater(value, zero)), one, below)


@converts(aten.copy.default)
def _copy(ctx: Importer, node: fx.Node, x: fx.Node, source: Operand, *_: Any) -> relax.Expr:
    """Emit ``source`` in the shape and dtype of ``x``."""
    value = ctx.tensor(source, result_dtype(node))
    shape = [int(s) for s in node.meta["val"].shape]
    same = isinstance(source, fx.Node) and list(source.meta["val"].shape) == shape
    return value if same else relax.op.broadcast_to(value, shape)
