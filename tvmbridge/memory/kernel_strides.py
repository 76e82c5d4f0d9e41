"""Strides of results as PyTorch's kernels give them, where its fake kernels do not."""

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

# Their first result is contiguous, or channels_last where the input is.
_NORMS = frozenset(
    {
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_no_training.default,
        aten._batch_norm_with_update.default,
        aten._batch_norm_no_update.default,
    }
)
# Their result lies as the tensor that a number is combined with.
_WITH_NUMBERS = frozenset({aten.copysign.Scalar, aten.floor_divide.Scalar, aten.div.Scalar_mode})


class KernelStrides(TorchDispatchMode):
    """Within it results of fake tensors have the strides that they have of others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func in _NORMS:
            normed, *others = results
            like = torch.empty_like(args[0], memory_format=suggest_memory_format(args[0]))
            return (_laid(normed, like), *others)
        if func in _WITH_NUMBERS:
            return _laid(results, torch.empty_like(args[0]))
        return results


def _laid(result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if result.stride() == like.stride():
        return result
    return torch.empty_strided(
        result.shape, like.stride(), dtype=result.dtype, device=result.device
    )
