"""Converters of operators that become separate loop nests, which are not fused with others.

PyTorch's kernels for these operators run on all cores. So an operator stays a call of the kernel
above a size that was measured.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from tvmbridge.core.alone import runs_alone
from tvmbridge.core.decisions import Rule, decided
from tvmbridge.frontend.elementwise import result_dtype
from tvmbridge.frontend.importer import Importer
from tvmbridge.frontend.limits import FEW_CALLS
from tvmbridge.frontend.registry import FLOATS, HALVES, MOVED, NUMBERS, Declined, converts
from tvmbridge.frontend.shapes import shape_of

aten = torch.ops.aten

_INDICES = (torch.int32, torch.int64)
# The most elements that a serial loop writes.
_MOST_WRITTEN = 1 << 16
_MOST_SORTED = 1 << 12
_MOST_CHOSEN = 32
# Above this number of rows PyTorch computes Euclidean distances by a matrix product.
_ROWS_BY_PRODUCT = 25


@converts(aten.cumsum.default, dtypes=MOVED)
def _cumsum(ctx: Importer, node: fx.Node, x: fx.Node, dim: int, **_: Any) -> Any:
    have, want = result_dtype(x), result_dtype(node)
    if not shape_of(x):
        raise Declined("a running sum of a 0-d tensor")
    if have.is_floating_point and not want.is_floating_point and not runs_alone():
        raise Declined("a float to integer conversion is undefined out of range")
    if torch.bool in (have, want) and want is torch.bool:
        raise Declined("a running sum in bool")
    return ctx.compiled_call(node)


@converts(aten.scatter.src, aten.scatter.value, aten.scatter_add.default, dtypes=NUMBERS | HALVES)
def _scatter(
    ctx: Importer, node: fx.Node, x: fx.Node, dim: int, places: fx.Node, source: Any
) -> Any:
    if places.meta["val"].dtype not in _INDICES or not shape_of(x) or not shape_of(places):
        raise Declined("0-d tensors, or indices of another dtype")
    _refuse_many(node, places)
    if isinstance(source, fx.Node) and (
        result_dtype(source) != result_dtype(x) or not shape_of(source)
    ):
        raise Declined("a source of another dtype or without dimensions")
    return ctx.compiled_call(node)


@converts(aten.index_put.default, dtypes=NUMBERS | HALVES)
def _index_put(
    ctx: Importer,
    node: fx.Node,
    x: fx.Node,
    indices: Sequence[fx.Node | None],
    values: fx.Node,
    accumulate: bool = False,
) -> Any:
    given = [i for i in indices if i is not None]
    if not given or any(i.meta["val"].dtype not in _INDICES for i in given):
        raise Declined("an index that is no integer")
    if result_dtype(values) != result_dtype(x) or not shape_of(x):
        raise Declined("values of another dtype, or a 0-d tensor")
    _refuse_many(node, values, *given)
    return ctx.compiled_call(node)


@converts(aten._cdist_forward.default, dtypes=FLOATS, widens=False)
def _cdist(
    ctx: Importer, node: fx.Node, x: fx.Node, y: fx.Node, p: float, mode: int | None = None
) -> Any:
    rows = max(shape_of(x)[-2], shape_of(y)[-2])
    if p == 2 and mode != 2 and (mode == 1 or rows > _ROWS_BY_PRODUCT) and not runs_alone():
        raise Declined("distances that PyTorch takes from a matrix product")
    _refuse_costly(prod(shape_of(node)) * shape_of(x)[-1], p)
    return ctx.compiled_call(node)


@converts(aten._pdist_forward.default, dtypes=FLOATS, widens=False)
def _pdist(ctx: Importer, node: fx.Node, x: fx.Node, p: float = 2.0) -> Any:
    _refuse_costly(prod(shape_of(node)) * shape_of(x)[-1], p)
    return ctx.compiled_call(node)


def _refuse_costly(terms: int, p: float) -> None:
    if p == math.inf:
        raise Declined("a largest difference, of which PyTorch passes over some that are NaN")
    most = _MOST_WRITTEN if p in (0, 1, 2) else FEW_CALLS
    if not runs_alone() and decided(Rule.MIDDLE, lambda: terms > most):
        raise Declined("many distances, for which PyTorch has vectors")


@converts(aten.histc.default, dtypes=FLOATS, widens=False)
def _histc(
    ctx: Importer, node: fx.Node, x: fx.Node, bins: int = 100, low: float = 0, high: float = 0
) -> Any:
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise Declined("a range that PyTorch refuses")
    _refuse_many(x)
    return ctx.compiled_call(node)


@converts(aten.col2im.default, dtypes=FLOATS | HALVES)
def _col2im(ctx: Importer, node: fx.Node, *_: Any) -> Any:
    return ctx.compiled_call(node)


@converts(aten.sort.default, aten.sort.stable, dtypes=NUMBERS | HALVES)
def _sort(ctx: Importer, node: fx.Node, x: fx.Node, *_: Any, **kwargs: Any) -> Any:
    if not shape_of(x) or _are_many(_MOST_SORTED, x):
        raise Declined("a 0-d tensor, or many elements, for which PyTorch has vectors")
    if not kwargs.get("stable") and _depends_on_kernel(node):
        raise Declined("the order of equal elements is that of PyTorch's kernel")
    return ctx.compiled_call(node)


@converts(aten.topk.default, dtypes=NUMBERS | HALVES)
def _topk(
    ctx: Importer,
    node: fx.Node,
    x: fx.Node,
    k: int,
    dim: int = -1,
    largest: bool = True,
    in_order: bool = True,
) -> Any:
    many = k > _MOST_CHOSEN and not runs_alone()
    if not shape_of(x) or many or _are_many(_MOST_SORTED, x):
        raise Declined("a 0-d tensor, or many elements")
    if not runs_alone() and (not in_order or _depends_on_kernel(node)):
        raise Declined("the order of equal elements is that of PyTorch's kernel")
    return ctx.compiled_call(node)


def _depends_on_kernel(node: fx.Node) -> bool:
    """Whether a node reads the second result (the indices), or the tuple of results.

    PyTorch leaves the order of equal elements open; compiled code has the order of its kernel if
    the kernel is there.
    """
    return not runs_alone() and any(
        user.target is not operator.getitem or user.args[1] == 1 for user in node.users
    )


def _refuse_many(*nodes: fx.Node) -> None:
    if _are_many(_MOST_WRITTEN, *nodes):
        raise Declined("many elements, for which PyTorch's kernel uses all cores")


def _are_many(most: int, *nodes: fx.Node) -> bool:
    """Whether a tensor has more than ``most`` elements; loops and kernel are right for any."""
    return not runs_alone() and decided(
        Rule.MIDDLE, lambda: max(prod(shape_of(n)) for n in nodes) > most
    )
