"""Replace losses and splits of empty tensors by forms that can be traced and differentiated.

PyTorch's kernels handle empty tensors, but its decompositions divide by the number of elements or
chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from tvmbridge.graph_capture.trace.function_table import Call, replaces

_LOSSES = (functional.mse_loss, functional.smooth_l1_loss, functional.huber_loss)
_SPLITS: dict[Any, Callable[..., Any]] = {
    torch.split: torch.split_with_sizes,
    torch.Tensor.split: torch.split_with_sizes,
    torch.unsafe_split: torch.unsafe_split_with_sizes,
    torch.Tensor.unsafe_split: torch.unsafe_split_with_sizes,
}


# Runs before the handler of ``promotion.py`` for mixed dtypes, which then gets reduction="none".
@replaces(*_LOSSES, order=-1)
def _mean_of_empty(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_mean = kwargs.get("reduction", "mean") == "mean" and kwargs.get("weight") is None
    if is_mean and len(args) == 2 and not any(a.numel() for a in args):
        return call(*args, **{**kwargs, "reduction": "none"}).mean()
    return call(*args, **kwargs)


@replaces(*_SPLITS)
def _parts_of_empty(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = None
    if args and isinstance(args[0], torch.Tensor):
        found = _whole_of_nothing(call.function, *args, **kwargs)
    return call(*args, **kwargs) if found is None else found


def _whole_of_nothing(
    func: Any, tensor: torch.Tensor, size: Any = None, dim: Any = 0, **named: Any
) -> Any:
    """Return the only chunk of a dimension of size 0; None if the dimension has elements."""
    size = named.get("split_size", named.get("split_size_or_sections", size))
    if not isinstance(size, int) or not isinstance(dim, int) or not tensor.dim():
        return None
    if size < 1 or tensor.shape[dim]:
        return None
    return _SPLITS[func](tensor, [0], dim)
