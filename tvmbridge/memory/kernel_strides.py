"""Strides of results as PyTorch's kernels give them, where its fake kernels do not.

They say how outputs lie, and whether a ``reshape`` or ``contiguous()`` is a view: where a trace has
other strides, what is written into one may reach the other in the trace alone, or in eager PyTorch
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode

from tvmbridge.tracing.patches import patched_here

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


def _in_memory_format(result: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(result, memory_format=suggest_memory_format(x))


def _as_first(_: torch.Tensor, x: torch.Tensor, *__: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _as_sum(_: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *__: Any) -> torch.Tensor:
    return torch.empty_like(x) + torch.empty_like(y)


# Overload -> a tensor that lies as its first result.
_LIKE: dict[Any, Callable[..., torch.Tensor]] = {
    **dict.fromkeys((*_NORMS, *_MOVES), _in_memory_format),
    **dict.fromkeys(_WITH_NUMBERS, _as_first),
    **dict.fromkeys(_BROADCAST, _as_sum),
}


@contextmanager
def strides_of_kernels() -> Iterator[None]:
    """Within it results of fake tensors have the strides that they have of others."""
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
    like = _LIKE.get(func)
    if like is None:
        return results
    with mode:
        if isinstance(results, torch.Tensor):
            return _laid(results, like(results, *args))
        first, *others = results
        return (_laid(first, like(first, *args)), *others)


def _laid(result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if result.stride() == like.stride():
        return result
    return torch.empty_strided(
        result.shape, like.stride(), dtype=result.dtype, device=result.device
    )
