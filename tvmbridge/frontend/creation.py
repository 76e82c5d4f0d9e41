"""Converters of operators that create tensors.

The importer runs operators that read no tensor by PyTorch, and makes their results constants,
unless they are large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from tvm import relax

from tvmbridge.frontend.elementwise import result_dtype
from tvmbridge.frontend.importer import Importer
from tvmbridge.frontend.registry import converts
from tvmbridge.kernels.dtypes import to_relax_dtype

aten = torch.ops.aten


def filled(shape: Sequence[int], value: int | float | bool, dtype: torch.dtype) -> relax.Expr:
    """Return an expression of a tensor whose elements are all ``value``."""
    number = relax.const(value, to_relax_dtype(dtype))
    if isinstance(value, float) and not math.isfinite(value):
        # TVM cannot legalize R.full of NaN or infinity.
        return relax.op.broadcast_to(number, [int(s) for s in shape])
    return relax.op.full([int(s) for s in shape], number, to_relax_dtype(dtype))


def _full(node: fx.Node, value: int | float | bool) -> relax.Expr:
    return filled(node.meta["val"].shape, value, result_dtype(node))


@converts(aten.full.default)
def _full_of_shape(
    ctx: Importer, node: fx.Node, size: Any, value: int | float | bool, **_: Any
) -> relax.Expr:
    return _full(node, value)


@converts(aten.full_like.default, aten.fill.Scalar)
def _full_like(
    ctx: Importer, node: fx.Node, x: fx.Node, value: int | float | bool, **_: Any
) -> relax.Expr:
    return _full(node, value)


@converts(aten.new_full.default)
def _new_full(
    ctx: Importer, node: fx.Node, x: fx.Node, size: Any, value: int | float | bool, **_: Any
) -> relax.Expr:
    return _full(node, value)


@converts(aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default)
def _zeros(ctx: Importer, node: fx.Node, *_: Any, **__: Any) -> relax.Expr:
    return _full(node, 0)


@converts(aten.ones_like.default, aten.ones.default, aten.new_ones.default)
def _ones(ctx: Importer, node: fx.Node, *_: Any, **__: Any) -> relax.Expr:
    return _full(node, 1)
