"""Converters of operators that Relax lacks, and that :mod:`tvmbridge.legalize.aten` has loops for.

The operators stay ATen calls in the graph, so that passes can read which operator a call is. The
pass CompileAtenCalls replaces the calls by loops.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from tvmbridge.frontend.elementwise import result_dtype
from tvmbridge.frontend.importer import Importer
from tvmbridge.frontend.limits import are_many_calls
from tvmbridge.frontend.registry import COMPUTED, FLOATS, HALVES, MOVED, NUMBERS, Declined, converts
from tvmbridge.frontend.shapes import shape_of

aten = torch.ops.aten

_QUOTIENTS = (aten.div.Tensor_mode, aten.div.Scalar_mode)
_INDICES = (torch.int32, torch.int64)


@converts(
    aten.log1p.default,
    aten.expm1.default,
    aten.cosh.default,
    aten.asinh.default,
    aten.acosh.default,
    aten.atanh.default,
    aten.asin.default,
    aten.acos.default,
    aten.atan.default,
    aten.atan2.default,
    dtypes=COMPUTED | HALVES,
)
def _function(ctx: Importer, node: fx.Node, *_: Any) -> Any:
    return ctx.compiled_call(node)


@converts(
    aten.elu.default,
    aten.softplus.default,
    aten.softplus_backward.default,
    dtypes=FLOATS | HALVES,
)
def _activation(ctx: Importer, node: fx.Node, *_: Any) -> Any:
    return ctx.compiled_call(node)


@converts(
    aten.bitwise_and.Scalar,
    aten.bitwise_or.Scalar,
    aten.bitwise_xor.Scalar,
    dtypes=frozenset({torch.int32, torch.int64}),
)
def _bitwise_by_number(ctx: Importer, node: fx.Node, *_: Any) -> Any:
    return ctx.compiled_call(node)


@converts(
    aten.fmod.Scalar,
    aten.fmod.Tensor,
    aten.div.Tensor_mode,
    aten.div.Scalar_mode,
    dtypes=NUMBERS,
)
def _rounded_quotient(
    ctx: Importer, node: fx.Node, a: fx.Node, b: Any, rounding_mode: str | None = "trunc"
) -> Any:
    dtype = result_dtype(node)
    if rounding_mode is None:
        raise Declined("a division that does not round")
    by_remainder = node.target not in _QUOTIENTS or rounding_mode == "floor"
    if dtype.is_floating_point and by_remainder:
        if isinstance(b, fx.Node) or not 1 <= abs(b) < math.inf:
            raise Declined("a remainder which PyTorch's vectors compute otherwise than libm")
        if are_many_calls(node):
            raise Declined("a remainder of many floats, for which PyTorch has vectors")
    if not dtype.is_floating_point and (isinstance(b, fx.Node) or not 0 < b < 2**31):
        raise Declined("integers divided by what may be zero")
    return ctx.compiled_call(node)


@converts(
    aten.pow.Tensor_Tensor,
    aten.pow.Scalar,
    dtypes=NUMBERS | HALVES,
)
def _power(ctx: Importer, node: fx.Node, *_: Any) -> Any:
    if not result_dtype(node).is_floating_point:
        raise Declined("powers of integers")
    if are_many_calls(node):
        raise Declined("many powers, for which PyTorch has vectors")
    return ctx.compiled_call(node)


@converts(aten.index.Tensor, dtypes=MOVED)
def _index(ctx: Importer, node: fx.Node, x: fx.Node, indices: Any) -> Any:
    for index in indices:
        if index is not None and index.meta["val"].dtype not in _INDICES:
            raise Declined("an index that is no integer")
    return ctx.compiled_call(node)


@converts(aten.gather.default, aten.index_select.default, dtypes=MOVED)
def _gather(ctx: Importer, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, **_: Any) -> Any:
    if index.meta["val"].dtype not in _INDICES or not shape_of(x) or not shape_of(index):
        raise Declined("0-d tensors, or indices of another dtype")
    return ctx.compiled_call(node)


@converts(aten.diagonal.default, aten.slice_scatter.default, dtypes=MOVED)
def _move(ctx: Importer, node: fx.Node, x: fx.Node, *rest: Any, **_: Any) -> Any:
    if any(result_dtype(n) != result_dtype(x) for n in node.all_input_nodes):
        raise Declined("a source of another dtype")
    return ctx.compiled_call(node)


@converts(aten.roll.default, dtypes=MOVED)
def _roll(ctx: Importer, node: fx.Node, x: fx.Node, *_: Any) -> Any:
    if not math.prod(shape_of(x)) or not shape_of(x):
        raise Declined("a 0-d tensor, or an empty one")
    return ctx.compiled_call(node)


@converts(aten.argmax.default, aten.argmin.default, dtypes=NUMBERS)
def _argument(ctx: Importer, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> Any:
    if not shape_of(x):
        raise Declined("an extremum of a 0-d tensor")
    return ctx.compiled_call(node)
