"""The decomposition table of the capture: what stays whole and what is taken apart, and how."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.export import default_decompositions

aten = torch.ops.aten

# Operators that stay whole: the frontend or a kernel does better with them than with their parts.
_KEPT_WHOLE = (
    aten.linear.default,
    aten.matmul.default,
    aten.dropout.default,
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.upsample_bilinear2d.vec,
    aten.upsample_nearest2d.vec,
    aten.upsample_bicubic2d.vec,
)


def decomposition_table(*, differentiated: bool) -> dict[Any, Callable[..., Any]]:
    """Overload -> decomposition, for ``ExportedProgram.run_decompositions``.

    Args:
        differentiated: attention is taken apart, because TVM's Gradient needs its parts and
            because its dropout must be drawn outside; otherwise it stays one kernel.
    """
    table: dict[Any, Callable[..., Any]] = dict(default_decompositions())
    for op in _KEPT_WHOLE:
        table.pop(op, None)
    sdpa = aten.scaled_dot_product_attention.default
    if differentiated:
        whole = table[sdpa]
        table[sdpa] = lambda *args, **kwargs: _attention(whole, *args, **kwargs)
    else:
        table.pop(sdpa, None)
    return table


def _attention(
    whole: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention spelled out, without the test for fully masked rows where no row can be masked."""
    if attn_mask is not None or is_causal or enable_gqa or query.dim() < 3:
        return whole(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(query, key.transpose(-2, -1)) * factor
    weights = torch.softmax(scores, -1)
    if dropout_p > 0.0:
        weights = torch.dropout(weights, dropout_p, True)
    return torch.matmul(weights, value)
