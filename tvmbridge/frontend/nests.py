"""Converters of operators that become loops of our own which nothing fuses with.

PyTorch's kernels for them run on all cores: beyond a size that was measured they stay calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from tvmbridge.frontend.compiled import emit_compiled
from tvmbridge.frontend.elementwise import result_dtype
from tvmbridge.frontend.importer import Importer
from tvmbridge.frontend.registry import MOVED, NUMBERS, Declined, converts
from tvmbridge.frontend.shapes import shape_of

aten = torch.ops.aten

HALVES = frozenset({torch.float16, torch.bfloat16})
_INDICES = (torch.int32, torch.int64)
# Elements that are written one after the other.
_MOST_WRITTEN = 1 << 16


@converts(aten.cumsum.default, dtypes=MOVED)
def _cumsum(ctx: Importer, node: fx.Node, x: fx.Node, dim: int, **_: Any) -> Any:
    have, want = result_dtype(x), result_dtype(node)
    if not shape_of(x):
        raise Declined("a running sum of a 0-d tensor")
    if have.is_floating_point and not want.is_floating_point:
        raise Declined("a float to integer conversion is undefined out of range")
    if torch.bool in (have, want) and want is torch.bool:
        raise Declined("a running sum in bool")
    return emit_compiled(ctx, node)


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
    return emit_compiled(ctx, node)


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
    return emit_compiled(ctx, node)


def _refuse_many(*nodes: fx.Node) -> None:
    if max(prod(shape_of(n)) for n in nodes) > _MOST_WRITTEN:
        raise Declined("many elements, for which PyTorch's kernel uses all cores")
