"""Trace masked and indexed writes of values that require a gradient.

PyTorch's gradient for the values in ``x[mask] = value`` and ``index_fill`` uses ``nonzero`` and
``unique``, whose shapes are data-dependent. With a scalar value both writes become ``masked_fill``,
whose gradient is a masked sum. A write of several values becomes one opaque operator.

``x[:, i] = value`` with a tensor ``i`` of one number becomes ``index_copy_``: PyTorch would read
the number.

``x[0] = n`` of an integer becomes ``x[0].fill_(n)``: PyTorch would make a constant tensor of the
integer, which cannot depend on a size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    if call.function is torch.Tensor.__setitem__:
        if _is_of_integer(*args):
            args[0][args[1]].fill_(args[2])
            return None
        if result is None and _is_at_numbers(*args):
            return _write_at_numbers(*args)
    if result is None:
        return call(*args, **kwargs)
    if call.function not in _IN_PLACE:
        return result
    target = args[0] if args else kwargs["input"]
    target.copy_(result)
    return None if call.function is torch.Tensor.__setitem__ else target


def _is_of_integer(tensor: Any, index: Any, value: Any) -> bool:
    """Whether an integer is written to all elements of a view of ``tensor``."""
    return type(value) is int and all(map(_is_plain, _places(index)))


def _places(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_plain(place: Any) -> bool:
    """Whether ``place`` is a constant part of an index that gives a view."""
    if isinstance(place, slice):
        bounds = place.start, place.stop, place.step
        return all(type(bound) in (int, type(None)) for bound in bounds)
    return type(place) in (int, type(None), type(...))


def _is_number(place: Any) -> bool:
    """Whether ``place`` is a tensor that PyTorch takes for an integer in an index."""
    integers = (torch.int8, torch.int16, torch.int32, torch.int64)
    return isinstance(place, torch.Tensor) and not place.dim() and place.dtype in integers


def _is_at_numbers(tensor: Any, index: Any, value: Any) -> bool:
    places = _places(index)
    numbers = [place for place in places if _is_number(place)]
    return (
        bool(numbers)
        and isinstance(tensor, torch.Tensor)
        and all(n.device == tensor.device for n in numbers)
        and all(_is_number(place) or _is_plain(place) for place in places)
    )


def _write_at_numbers(tensor: torch.Tensor, index: Any, value: Any) -> None:
    places = _places(index)
    view = tensor[tuple(slice(None) if _is_number(place) else place for place in places)]
    beyond = tensor.dim() - sum(place is not None and place is not ... for place in places)
    numbers, dim = [], 0
    for place in places:
        if _is_number(place):
            numbers.append((dim, place))
        dim += beyond if place is ... else not isinstance(place, int)
    _write_rows(view, numbers, value)


def _write_rows(
    view: torch.Tensor, numbers: Sequence[tuple[int, torch.Tensor]], value: Any
) -> None:
    """Write ``value`` to the rows of ``view`` at ``numbers``, each a dimension and an index."""
    if not numbers:
        view[...] = value
        return
    *others, (dim, number) = numbers
    at = torch.where(number < 0, number + view.shape[dim], number).long().reshape(1)
    rows = view.index_select(dim, at).squeeze(dim)
    _write_rows(rows, others, value)
    view.index_copy_(dim, at, rows.unsqueeze(dim))


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
    # A clone keeps the strides of the input, as index_fill does; masked_fill would not.
    return view.clone().masked_fill_(mask.reshape(shape), value).reshape(input.shape)
