"""Trace masked and indexed writes of values that require a gradient.

PyTorch's gradient for the values in ``x[mask] = value`` and ``index_fill`` uses ``nonzero`` and
``unique``, whose shapes are data-dependent. With a scalar value both writes become ``masked_fill``,
whose gradient is a masked sum. A write of several values becomes one opaque operator.

``x[0] = n`` of an integer becomes ``x[0].fill_(n)``: PyTorch would make a constant tensor of the
integer, which cannot depend on a size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tvmbridge.graph_capture.trace.opaque_ops  # noqa: F401  (its operators)
from tvmbridge.graph_capture.trace.function_table import Call, replaces

_PUTS = (torch.Tensor.index_put_, torch.index_put_, torch.Tensor.index_put, torch.index_put)
_FILLS = (torch.Tensor.index_fill_, torch.Tensor.index_fill, torch.index_fill)
_IN_PLACE = (torch.Tensor.__setitem__, *_PUTS[:2], _FILLS[0])


@replaces(torch.Tensor.__setitem__, *_PUTS, *_FILLS)
def _written(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    functional: Callable[..., torch.Tensor | None] = _filled
    if call.function not in _FILLS:
        functional = _put if call.function in _PUTS else _assigned
    result = None if "out" in kwargs else functional(*args, **kwargs)
    if call.function is torch.Tensor.__setitem__ and _is_of_integer(*args):
        args[0][args[1]].fill_(args[2])
        return None
    if result is None:
        return call(*args, **kwargs)
    if call.function not in _IN_PLACE:
        return result
    target = args[0] if args else kwargs["input"]
    target.copy_(result)
    return None if call.function is torch.Tensor.__setitem__ else target


def _is_of_integer(tensor: Any, index: Any, value: Any) -> bool:
    """Whether an integer is written to all elements of a view of ``tensor``."""
    places = index if isinstance(index, tuple) else (index,)
    return (
        type(value) is int
        and all(type(place) in (int, slice, type(None), type(...)) for place in places)
        and all(
            type(bound) in (int, type(None))
            for place in places
            if isinstance(place, slice)
            for bound in (place.start, place.stop, place.step)
        )
    )


def _is_learned(tensor: Any, value: Any) -> bool:
    """Whether ``value`` requires a gradient and is written without a conversion."""
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
    # A clone, because the gradient reads the input, which is written next.
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
