"""Converters of norms whose saved statistics are read, and of norms' backward, on a GPU.

The converters emit ATen calls that become loops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from tvmbridge.backends import backend_of
from tvmbridge.frontend.importer import Importer
from tvmbridge.frontend.registry import FLOATS, HALVES, Declined, converts
from tvmbridge.frontend.shapes import shape_of

aten = torch.ops.aten

Operand: TypeAlias = fx.Node | None

_DTYPES = FLOATS | HALVES
# Positions of the arguments of backward that are statistics.
_STATISTICS: dict[Any, slice] = {
    aten.native_layer_norm_backward.default: slice(3, 5),
    aten._fused_rms_norm_backward.default: slice(3, 4),
}


def check(node: fx.Node, *operands: Operand, unread: Sequence[int]) -> None:
    """Decline operands of several dtypes, and reads of results that Relax does not compute.

    Args:
        unread: indices of the results that must not be read.

    Raises:
        Declined: the dtypes differ, or one of the results is read.
    """
    dtypes = {n.meta["val"].dtype for n in operands if n is not None}
    if len(dtypes) > 1:
        raise Declined("a norm of several dtypes")
    if unread and any(user.args[1] in unread for user in node.users):
        raise Declined("a norm whose saved statistics are read")


def wide(x: fx.Node) -> torch.dtype:
    """Return the dtype that a norm of ``x`` is computed in: float32 for half precision."""
    dtype: torch.dtype = x.meta["val"].dtype
    return torch.float32 if dtype in HALVES else dtype


def with_statistics(ctx: Importer, node: fx.Node, x: fx.Node) -> Any:
    """Emit an ATen call, which becomes loops, of a norm with statistics, or of a norm's backward.

    Raises:
        Declined: PyTorch's kernels are as fast on the device, the statistics have another dtype
            than ``wide(x)``, or the tensor is empty.
    """
    if not backend_of(x.meta["val"].device).norms_in_loops:
        raise Declined("a norm whose saved statistics are read")
    read = _STATISTICS.get(node.target)
    if read is None:
        dtypes = {value.dtype for value in node.meta["val"][1:]}
    else:
        dtypes = {n.meta["val"].dtype for n in node.args[read] if isinstance(n, fx.Node)}
    if dtypes != {wide(x)} or not math.prod(shape_of(x)):
        raise Declined("statistics of another dtype, or of nothing")
    return ctx.compiled_call(node)


@converts(
    aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default, dtypes=_DTYPES
)
def _backward(ctx: Importer, node: fx.Node, grad_out: fx.Node, x: fx.Node, *_: Any) -> Any:
    operands = [n for n in node.all_input_nodes if n.meta["val"].dtype != wide(x)]
    check(node, x, *operands, unread=())
    return with_statistics(ctx, node, x)


@converts(aten._fused_rms_norm.default, dtypes=_DTYPES)
def _fused_rms_norm(
    ctx: Importer,
    node: fx.Node,
    x: fx.Node,
    normalized_shape: Sequence[int],
    weight: Operand,
    eps: float | None,
) -> Any:
    check(node, x, weight, unread=())
    return with_statistics(ctx, node, x)
