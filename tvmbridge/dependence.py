"""Which functions of PyTorch have results whose shape or value only their data tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from tvmbridge.errors import CaptureError

_NAMES = (
    *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"),
    *("equal", "allclose", "item", "tolist"),
)
_DEPENDENT = frozenset(
    getattr(owner, name)
    for owner in (torch, torch.functional, torch.Tensor)
    for name in _NAMES
    if hasattr(owner, name)
)
_BY_TENSOR: Mapping[Any, int] = {
    getattr(owner, name): place
    for owner in (torch, torch.Tensor)
    for name, place in (("narrow", 2), ("tensor_split", 1), ("repeat_interleave", 1))
}


class DependenceError(CaptureError):
    """Forward does with a data-dependent value what nothing can be compiled around."""

    def __init__(self, what: str) -> None:
        super().__init__(f"forward {what}")


def is_known(arguments: Any) -> bool:
    """Whether all tensors are constants that PyTorch traces with their values."""
    tensors = [t for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)]
    return all(getattr(t, "constant", None) is not None for t in tensors)


def depends_on_data(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the shape of the result, or a number that it is, depends on the tensors' values."""
    if func in _DEPENDENT:
        return True
    if func is torch.where:
        return len(args) + len(kwargs) == 1
    if func is functional.one_hot:
        classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
        return bool(classes == -1)
    if func is torch.Tensor.__getitem__:
        return any(map(_reads_values, args[1] if type(args[1]) is tuple else (args[1],)))
    place = _BY_TENSOR.get(func)
    if place is None or kwargs.get("output_size") is not None:
        return False
    names = ("start", "repeats", "tensor_indices_or_sections", "indices_or_sections")
    given = [*args[place : place + 1], *(kwargs[n] for n in names if n in kwargs)]
    alone = func is torch.repeat_interleave and len(args) == 1 and not given
    return alone or any(isinstance(g, torch.Tensor) for g in given)


def _reads_values(index: Any) -> bool:
    """Whether it is a mask, or one unknown number, which PyTorch takes for a Python integer."""
    if isinstance(index, slice):
        return not is_known((index.start, index.stop, index.step))
    if not isinstance(index, torch.Tensor):
        return False
    return index.dtype in (torch.bool, torch.uint8) or (index.dim() == 0 and not is_known(index))
