"""Replace operators on empty tensors by forms that can be traced, differentiated and compiled.

PyTorch's kernels handle empty tensors, but its decompositions divide by the number of elements or
chunks, and compiled code has no empty tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from tvmbridge.graph_capture.trace.function_table import Call, replaces

_LOSSES = (functional.mse_loss, functional.smooth_l1_loss, functional.huber_loss)
_SPLITS: dict[Any, Callable[..., Any]] = {
    torch.split: torch.split_with_sizes,
    torch.Tensor.split: torch.split_with_sizes,
    torch.unsafe_split: torch.unsafe_split_with_sizes,
    torch.Tensor.unsafe_split: torch.unsafe_split_with_sizes,
}


def drop_empty_operands(graph: fx.Graph) -> None:
    """Remove operands without elements from concatenations whose dtype others determine as well.

    A rotary embedding of whole heads, for example, concatenates an empty rest of each head.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
        operands = node.args[0]
        kept = [x for x in operands if not _is_empty(x.meta["val"])]
        dtypes = {x.meta["val"].dtype for x in kept}
        if len(kept) < len(operands) and dtypes == {node.meta["val"].dtype}:
            node.update_arg(0, kept)


def _is_empty(tensor: torch.Tensor) -> bool:
    return any(isinstance(size, int) and size == 0 for size in tensor.shape)


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
