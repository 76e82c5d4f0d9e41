"""Trace assignments of new tensors to buffers as writes into the old buffers.

``self.average = 0.9 * self.average + ...`` gives a module another tensor. torch.export supports
this in the outermost module alone. It writes in the order of the assignments, so that one write may
read a buffer that another has already changed. Here all assigned tensors are written into the
original buffers together, at the end of forward.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tvmbridge.calls.patches import patched_here
from tvmbridge.core.errors import CaptureError
from tvmbridge.core.torch_private import export_trace


@contextmanager
def exchanges_written(module: nn.Module) -> Iterator[None]:
    """On exit, write newly assigned tensors into the original buffers, and restore these."""
    before = list(_buffers(module))
    yield
    exchanged = [held for held in before if held[1].get(held[2]) is not held[3]]
    # All are read before one is written, because two buffers may have been swapped.
    values = [_value(before, *held) for held in exchanged]
    for (_, place, key, tensor), value in zip(exchanged, values, strict=True):
        tensor.copy_(value)
        place[key] = tensor


_Place = dict[str, torch.Tensor | None]
_Held = tuple[str, _Place, str, torch.Tensor]


def _buffers(module: nn.Module) -> Iterator[_Held]:
    """Yield, for each buffer, its dotted name, the dict that holds it, its key, and the tensor."""
    for path, owner in module.named_modules():
        for key, tensor in owner._buffers.items():
            if tensor is not None:
                yield f"{path}.{key}".removeprefix("."), owner._buffers, key, tensor


def _value(
    before: list[_Held], name: str, place: _Place, key: str, tensor: torch.Tensor
) -> torch.Tensor:
    """Return a copy of the tensor that was assigned in place of the buffer ``tensor``.

    Raises:
        CaptureError: the new tensor has another shape or dtype or is missing, or the buffer is
            registered under a second name.
    """
    value = place.get(key)
    if value is None or value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise CaptureError(
            f"forward exchanges the buffer {name} for what has another shape or dtype at each call"
        )
    if sum(other is tensor for *_, other in before) > 1:
        raise CaptureError(f"forward exchanges the buffer {name}, which has another name too")
    return value.detach().clone()


def exchanges_left_alone() -> AbstractContextManager[Any]:
    """Return a context in which torch.export ignores assignments to buffers."""
    return patched_here(export_trace(), "register_buffer_assignment_hook", _no_hook)


def _no_hook(genuine: Callable[..., Any], *args: Any) -> RemovableHandle:
    return RemovableHandle(OrderedDict())
