"""Strides of results as PyTorch's kernels give them, where its fake kernels do not."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
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
# They are pointwise though they are not said to be.
_POINTWISE = frozenset(
    {aten.hardswish.default, aten.mse_loss.default, aten.pow.Tensor_Scalar},
)
# Their result lies as their argument in every case.
_AS_ARGUMENT = frozenset(
    {
        aten.clone.default,
        aten._to_copy.default,
        aten.copy.default,
        aten.hardtanh.default,
        aten.relu6.default,
        aten.rrelu.default,
        aten.nan_to_num.default,
        aten.deg2rad.default,
        aten.rad2deg.default,
    }
)


class KernelStrides(TorchDispatchMode):
    """Within it results of fake tensors have the strides that they have of others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func in _NORMS:
            normed, *others = results
            return (_laid(normed, _like_in_norms(args[0])), *others)
        if func in _WITH_NUMBERS:
            return _laid(results, torch.empty_like(args[0]))
        if _is_pointwise(func) and _all_contiguous(func, args, kwargs or {}):
            return _laid(results, torch.empty(results.shape, device="meta"))
        return results


@functools.cache
def _is_pointwise(func: Any) -> bool:
    """Whether PyTorch's iterator computes it from its operands as they are: all of them contiguous,
    and of one shape, the result is contiguous, though their strides may fit another format too."""
    if func in _POINTWISE:
        return True
    if torch.Tag.pointwise not in func.tags or func._schema.is_mutable or func in _AS_ARGUMENT:
        return False
    # A number is an operand there, a tensor of another shape.
    numbers = "scalar" in func._overloadname.lower()
    return len(func._schema.returns) == 1 and not numbers


def _all_contiguous(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether all operands are contiguous and of one shape."""
    declared = zip(func._schema.arguments, args, strict=False)
    given = [*declared, *((a, named[a.name]) for a in func._schema.arguments if a.name in named)]
    operands = [v for argument, v in given if "Tensor" in str(argument.type) and v is not None]
    if not all(isinstance(operand, torch.Tensor) for operand in operands):
        return False  # a number is a tensor of another shape
    shapes = {operand.shape for operand in operands}
    return len(shapes) == 1 and all(operand.is_contiguous() for operand in operands)


def _like_in_norms(input: torch.Tensor) -> torch.Tensor:
    # Strides of one channel or one pixel fit both formats.
    dense = input.is_contiguous()
    format = torch.contiguous_format if dense else suggest_memory_format(input)
    return torch.empty_like(input, memory_format=format)


def _laid(result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if result.stride() == like.stride():
        return result
    return torch.empty_strided(
        result.shape, like.stride(), dtype=result.dtype, device=result.device
    )
