"""Strides of results as PyTorch's kernels give them, where its fake kernels differ.

Strides decide how outputs lie, and whether ``reshape`` or ``contiguous()`` is a view: with other
strides a mutation would reach an alias in the trace alone, or in eager PyTorch alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tvmbridge.core.torch_private import (
    FakeTensorMode,
    OpOverload,
    make_contiguous_strides_for,
    suggest_memory_format,
)
from tvmbridge.graph_capture.trace.patches import patched_here

aten = torch.ops.aten

# Their first result is contiguous, or channels_last where the input is.
_NORMS = (
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_with_update.default,
    aten._batch_norm_no_update.default,
)
# So is their only result.
_MOVES = (
    aten.channel_shuffle.default,
    aten.native_channel_shuffle.default,
    aten.max_unpool2d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
)
# Their result lies as the tensor that a number is combined with.
_WITH_NUMBERS = (aten.copysign.Scalar, aten.floor_divide.Scalar, aten.div.Scalar_mode)
# Their result lies as a sum of the same operands does; where one of them is broadcast their
# fake kernels expand it first.
_BROADCAST = (
    aten.heaviside.default,
    aten.logaddexp.default,
    aten.logaddexp2.default,
    aten.logical_and.default,
    aten.logical_or.default,
    aten.logical_xor.default,
)
# They are pointwise though they are not said to be.
_POINTWISE = (aten.hardswish.default, aten.mse_loss.default, aten.pow.Tensor_Scalar)
# Their result lies as their argument in every case.
_AS_ARGUMENT = (
    aten.clone.default,
    aten._to_copy.default,
    aten.copy.default,
    aten.hardtanh.default,
    aten.relu6.default,
    aten.rrelu.default,
    aten.nan_to_num.default,
    aten.deg2rad.default,
    aten.rad2deg.default,
)


def _in_memory_format(result: torch.Tensor, x: torch.Tensor, *_: Any) -> Sequence[int]:
    return torch.empty_like(result, memory_format=suggest_memory_format(x)).stride()


def _contiguous(result: torch.Tensor, *_: Any) -> Sequence[int]:
    strides: tuple[int, ...] = make_contiguous_strides_for(result.shape)
    return strides


def _as_normed(result: torch.Tensor, x: torch.Tensor, *_: Any) -> Sequence[int]:
    # Strides of one channel or one pixel fit both formats.
    return _contiguous(result) if x.is_contiguous() else _in_memory_format(result, x)


def _as_first(_: torch.Tensor, x: torch.Tensor, *__: Any) -> Sequence[int]:
    return torch.empty_like(x).stride()


def _as_sum(_: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *__: Any) -> Sequence[int]:
    return (torch.empty_like(x) + torch.empty_like(y)).stride()


# Overload -> the strides of its first result.
_STRIDES: dict[Any, Callable[..., Sequence[int]]] = {
    **dict.fromkeys(_NORMS, _as_normed),
    **dict.fromkeys(_MOVES, _in_memory_format),
    **dict.fromkeys(_WITH_NUMBERS, _as_first),
    **dict.fromkeys(_BROADCAST, _as_sum),
}


@contextmanager
def strides_of_kernels() -> Iterator[None]:
    """Within it results of fake kernels have the strides of real ones."""
    with patched_here(FakeTensorMode, "dispatch", _dispatched):
        yield


def _dispatched(
    genuine: Callable[..., Any],
    mode: FakeTensorMode,
    func: Any,
    types: Any,
    args: Any = (),
    kwargs: Any = None,
) -> Any:
    results = genuine(mode, func, types, args, kwargs or {})
    strides_of = _STRIDES.get(func)
    if strides_of is None and _is_pointwise(func) and _all_contiguous(func, args, kwargs or {}):
        strides_of = _contiguous
    if strides_of is None:
        return results
    with mode:
        if isinstance(results, torch.Tensor):
            return _laid(results, strides_of(results, *args))
        first, *others = results
        return (_laid(first, strides_of(first, *args)), *others)


@functools.cache
def _is_pointwise(func: Any) -> bool:
    """Whether TensorIterator computes it: of contiguous operands of one shape the result is
    contiguous, though their strides may fit another memory format too.
    """
    if func in _POINTWISE:
        return True
    if not isinstance(func, OpOverload):
        return False
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
    if any(isinstance(size, torch.SymInt) for operand in operands for size in operand.shape):
        return False  # it depends on values: nothing is known of it
    shapes = {operand.shape for operand in operands}
    return len(shapes) == 1 and all(operand.is_contiguous() for operand in operands)


def _laid(result: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    if result.stride() == tuple(strides):
        return result
    return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)
