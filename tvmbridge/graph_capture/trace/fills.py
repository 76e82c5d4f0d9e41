"""Fills and masked writes whose values get a gradient, in forms that a trace can differentiate.

PyTorch differentiates ``x[mask] = value`` and ``index_fill`` by the values through ``nonzero`` and
``unique``, whose results have a shape that depends on the data. With a scalar both are
``masked_fill``, whose gradient is a masked sum; with several values the write is kept whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import tvmbridge.graph_capture.trace.opaque_ops  # noqa: F401  (its operators)

_PUTS = (torch.Tensor.index_put_, torch.index_put_, torch.Tensor.index_put, torch.index_put)
_FILLS = (torch.Tensor.index_fill_, torch.Tensor.index_fill, torch.index_fill)
_IN_PLACE = (torch.Tensor.__setitem__, *_PUTS[:2], _FILLS[0])


class FillsByMask(TorchFunctionMode):
    """Within it writes of learned values by a mask, or by a list of rows, are as said above."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        result = None
        if func is torch.Tensor.__setitem__:
            result = _assigned(*args, **named)
        elif func in _PUTS and "out" not in named:
            result = _put(*args, **named)
        elif func in _FILLS and "out" not in named:
            result = _filled(*args, **named)
        if result is None:
            return func(*args, **named)
        if func not in _IN_PLACE:
            return result
        target = args[0] if args else named["input"]
        target.copy_(result)
        return None if func is torch.Tensor.__setitem__ else target


def _is_learned(tensor: Any, value: Any) -> bool:
    """Whether ``value`` gets a gradient and is written as it is."""
    return (
        isinstance(tensor, torch.Tensor)
        and isinstance(value, torch.Tensor)
        and value.requires_grad
        and torch.is_grad_enabled()
        and value.dtype == tensor.dtype
        and value.device == tensor.device
    )


def _assigned(tensor: Any, index: Any, value: Any) -> torch.Tensor | None:
    if isinstance(index, tuple):
        index = index[0] if len(index) == 1 else None
    return _put(tensor, (index,), value)


def _put(input: Any, indices: Any, values: Any, accumulate: bool = False) -> torch.Tensor | None:
    if len(indices) != 1 or not _is_learned(input, values):
        return None
    (mask,) = indices
    if not (isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.dim()):
        return None
    if mask.shape != input.shape[: mask.dim()] or mask.device != input.device:
        return None
    beyond = input.dim() - mask.dim()
    if not values.dim() and not accumulate:
        return input.masked_fill(mask.reshape([*mask.shape, *[1] * beyond]), values)
    if values.dim() > 1 + beyond:
        return None
    # A clone, for its gradient reads the input, which may be written now.
    put = torch.ops.tvmbridge.put_by_mask
    result: torch.Tensor = put(input.clone(), mask, values, accumulate)
    return result


def _filled(input: Any, dim: Any, index: Any, value: Any) -> torch.Tensor | None:
    if not _is_learned(input, value) or value.dim() or not isinstance(dim, int):
        return None
    view = input if input.dim() else input.reshape(1)
    mask = torch.zeros(view.shape[dim], dtype=torch.bool, device=input.device)
    mask = mask.index_fill(0, index, True)
    shape = [1] * view.dim()
    shape[dim] = -1
    return view.masked_fill(mask.reshape(shape), value).reshape(input.shape)
