"""Converters of dropout and embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from tvm import relax

from tvmbridge.frontend.importer import Importer
from tvmbridge.frontend.registry import COMPUTED, FLOATS, HALVES, Declined, converts
from tvmbridge.frontend.shapes import shape_of
from tvmbridge.graph_capture.noise import dropout_arguments
from tvmbridge.kernels.dtypes import to_relax_dtype

aten = torch.ops.aten


@converts(aten.dropout.default, dtypes=FLOATS | HALVES)
def _inactive_dropout(ctx: Importer, node: fx.Node, *_: Any) -> relax.Expr:
    x, p, train = dropout_arguments(node)
    if train and p != 0:
        raise Declined("dropout of everything")
    return ctx.value(x)


@converts(aten.embedding.default, dtypes=COMPUTED | HALVES)
def _embedding(
    ctx: Importer,
    node: fx.Node,
    weight: fx.Node,
    indices: fx.Node,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> relax.Expr:
    if scale_grad_by_freq or sparse:
        raise Declined("embedding with a scaled or sparse gradient")
    flat = ctx.emit(relax.op.reshape(ctx.value(indices), (-1,)))
    rows = ctx.emit(relax.op.take(ctx.value(weight), flat, axis=0))
    if padding_idx >= 0:
        rows = _stop_padding_gradient(ctx, rows, flat, padding_idx, indices.meta["val"].dtype)
    return relax.op.reshape(rows, shape_of(node))


def _stop_padding_gradient(
    ctx: Importer, rows: relax.Expr, flat: relax.Expr, padding_idx: int, dtype: torch.dtype
) -> relax.Expr:
    """Return ``rows`` unchanged, but stop the gradient of rows of the padding index."""
    padding = ctx.emit(
        relax.op.equal(
            ctx.emit(relax.op.expand_dims(flat, 1)),
            relax.const(padding_idx, to_relax_dtype(dtype)),
        )
    )
    stopped = ctx.emit(relax.op.grad.no_grad(rows))
    return ctx.emit(relax.op.where(padding, stopped, rows))
