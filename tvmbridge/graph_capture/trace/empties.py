"""Functions of no elements, in forms that a trace can take and differentiate.

PyTorch's kernels answer them; its decompositions, which a trace asks, divide by the number of
elements or of parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_LOSSES = (functional.mse_loss, functional.smooth_l1_loss, functional.huber_loss)
_SPLITS: dict[Any, Callable[..., Any]] = {
    torch.split: torch.split_with_sizes,
    torch.Tensor.split: torch.split_with_sizes,
    torch.unsafe_split: torch.unsafe_split_with_sizes,
    torch.Tensor.unsafe_split: torch.unsafe_split_with_sizes,
}


class FunctionsOfNothing(TorchFunctionMode):
    """Within it means of no losses, and parts of no rows, are taken as said above."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func in _LOSSES and named.get("reduction", "mean") == "mean" and len(args) == 2:
            if not any(a.numel() for a in args) and named.get("weight") is None:
                return func(*args, **{**named, "reduction": "none"}).mean()
        elif func in _SPLITS and args and isinstance(args[0], torch.Tensor):
            found = _whole_of_nothing(func, *args, **named)
            if found is not None:
                return found
        return func(*args, **named)


def _whole_of_nothing(
    func: Any, tensor: torch.Tensor, size: Any = None, dim: Any = 0, **named: Any
) -> Any:
    """The one part of a dimension without elements; None where it has some."""
    size = named.get("split_size", named.get("split_size_or_sections", size))
    if not isinstance(size, int) or not isinstance(dim, int) or not tensor.dim():
        return None
    if size < 1 or tensor.shape[dim]:
        return None
    return _SPLITS[func](tensor, [0], dim)
