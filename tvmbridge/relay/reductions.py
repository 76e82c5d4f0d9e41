"""Converters of reductions, scans and orderings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tvmbridge.relay.registry import ALL, FLOATS, NUMBERS, ConverterFn, Refused, converts
from tvmbridge.relay.writer import Writer, axis_of, dtype_of, shape_of

aten = torch.ops.aten


def _axes(dims: Any, rank: int) -> list[int]:
    """Return the reduced dimensions; None and an empty list stand for all."""
    if dims is None or dims == [] or not rank:
        return list(range(rank))
    listed = [dims] if isinstance(dims, int) else list(dims)
    return sorted(axis_of(d, rank) for d in listed)


def _reduce(
    ctx: Writer, operator: str, text: str, axes: Sequence[int], keepdim: bool, **named: Any
) -> str:
    """Emit a reduction; of no dimensions it is the operand itself."""
    return ctx.call(operator, text, axis=list(axes), keepdims=keepdim, **named) if axes else text


def _sum_like(operator: str) -> ConverterFn:
    def convert(
        ctx: Writer,
        node: fx.Node,
        x: fx.Node,
        dims: Any = None,
        keepdim: bool = False,
        **named: Any,
    ) -> str:
        axes = _axes(dims, len(shape_of(x)))
        return _reduce(ctx, operator, ctx.operand(x, dtype_of(node)), axes, keepdim)

    return convert


converts(aten.sum.default, aten.sum.dim_IntList)(_sum_like("sum"))
converts(aten.mean.default, aten.mean.dim, dtypes=FLOATS)(_sum_like("mean"))
converts(aten.prod.default, aten.prod.dim_int)(_sum_like("prod"))
converts(aten.amax.default, dtypes=NUMBERS)(_sum_like("max"))
converts(aten.amin.default, dtypes=NUMBERS)(_sum_like("min"))
converts(aten.max.default, dtypes=NUMBERS)(_sum_like("max"))
converts(aten.min.default, dtypes=NUMBERS)(_sum_like("min"))


def _truth(operator: str) -> ConverterFn:
    def convert(
        ctx: Writer, node: fx.Node, x: fx.Node, dims: Any = None, keepdim: bool = False
    ) -> str:
        axes = _axes(dims, len(shape_of(x)))
        return _reduce(ctx, operator, ctx.operand(x, torch.bool), axes, keepdim)

    return convert


converts(aten.any.default, aten.any.dim, aten.any.dims)(_truth("any"))
converts(aten.all.default, aten.all.dim, aten.all.dims)(_truth("all"))


@converts(aten.var_mean.correction, dtypes=FLOATS)
def _var_mean(
    ctx: Writer, node: fx.Node, x: fx.Node, dims: Any = None, **named: Any
) -> tuple[str, str]:
    axes = _axes(dims, len(shape_of(x)))
    mean = _reduce(ctx, "mean", ctx.value(x), axes, bool(named.get("keepdim", False)))
    return _variance(ctx, x, dims, **named), mean


@converts(aten.var.correction, dtypes=FLOATS)
def _var(ctx: Writer, node: fx.Node, x: fx.Node, dims: Any = None, **named: Any) -> str:
    return _variance(ctx, x, dims, **named)


def _variance(
    ctx: Writer, x: fx.Node, dims: Any, correction: float | None = None, keepdim: bool = False
) -> str:
    shape, dtype, text = shape_of(x), dtype_of(x), ctx.value(x)
    axes = _axes(dims, len(shape))
    count = math.prod(shape[a] for a in axes) - (1 if correction is None else correction)
    if count <= 0 or not axes:
        raise Refused("a variance of too few elements")
    centred = ctx.call("subtract", text, ctx.call("mean", text, axis=axes, keepdims=True))
    squares = _reduce(ctx, "sum", ctx.call("multiply", centred, centred), axes, keepdim)
    return ctx.call("divide", squares, ctx.number(count, dtype))


def _arg(operator: str) -> ConverterFn:
    def convert(
        ctx: Writer, node: fx.Node, x: fx.Node, dim: int | None = None, keepdim: bool = False
    ) -> str:
        return _place_of_most(ctx, operator, x, dim, shape_of(node))

    return convert


def _place_of_most(
    ctx: Writer, operator: str, x: fx.Node, dim: int | None, shape: Sequence[int]
) -> str:
    """Return the int64 index of the greatest or least element, reshaped to ``shape``."""
    text, have = ctx.value(x), shape_of(x)
    if dim is None or not have:
        text, dim = ctx.reshape(text, [math.prod(have)]), 0
    places = ctx.call(operator, text, axis=[axis_of(dim, len(have))], keepdims=True)
    return ctx.reshape(ctx.call("cast", places, dtype=torch.int64), shape)


converts(aten.argmax.default, dtypes=NUMBERS)(_arg("argmax"))
converts(aten.argmin.default, dtypes=NUMBERS)(_arg("argmin"))


def _with_place(operator: str) -> ConverterFn:
    def convert(
        ctx: Writer, node: fx.Node, x: fx.Node, dim: int, keepdim: bool = False
    ) -> tuple[str, str]:
        shape = [int(n) for n in node.meta["val"][0].shape]
        axes = [axis_of(dim, len(shape_of(x)))] if shape_of(x) else []
        most = _reduce(ctx, operator, ctx.value(x), axes, keepdim)
        return most, _place_of_most(ctx, f"arg{operator}", x, dim, shape)

    return convert


converts(aten.max.dim, dtypes=NUMBERS)(_with_place("max"))
converts(aten.min.dim, dtypes=NUMBERS)(_with_place("min"))


@converts(aten.cumsum.default, aten.cumprod.default, dtypes=ALL)
def _scan(ctx: Writer, node: fx.Node, x: fx.Node, dim: int, **named: Any) -> str:
    dtype, rank = dtype_of(node), len(shape_of(x))
    text = ctx.operand(x, dtype)
    if not rank:
        return text
    name = "cumsum" if node.target is aten.cumsum.default else "cumprod"
    return ctx.call(name, text, axis=axis_of(dim, rank), dtype=dtype, exclusive=False)


@converts(aten.topk.default, dtypes=NUMBERS)
def _topk(
    ctx: Writer,
    node: fx.Node,
    x: fx.Node,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
) -> tuple[str, str]:
    rank = len(shape_of(x))
    if not rank or not k:
        raise Refused("topk of a 0-d tensor, or of no element")
    pair = ctx.call(
        "topk",
        ctx.value(x),
        k=k,
        axis=axis_of(dim, rank),
        ret_type="both",
        is_ascend=not largest,
        dtype=torch.int64,
    )
    return f"{pair}.0", f"{pair}.1"


@converts(aten.sort.default, aten.sort.stable, dtypes=NUMBERS)
def _sort(ctx: Writer, node: fx.Node, x: fx.Node, *args: Any, **named: Any) -> tuple[str, str]:
    given = [a for a in args if a is not None]
    if node.target is aten.sort.stable and args and isinstance(args[0], bool):
        given = given[1:]
    dim = named.get("dim", given[0] if given else -1)
    descending = bool(named.get("descending", given[1] if len(given) > 1 else False))
    rank, text = len(shape_of(x)), ctx.value(x)
    if not rank:
        raise Refused("sort of a 0-d tensor")
    axis = axis_of(dim, rank)
    places = ctx.call("argsort", text, axis=axis, is_ascend=not descending, dtype=torch.int64)
    return ctx.call("gather", text, places, axis=axis), places
