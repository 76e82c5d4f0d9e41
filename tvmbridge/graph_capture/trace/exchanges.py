"""Buffers that forward exchanges for others, taken for writes into them.

``self.average = 0.9 * self.average + ...`` gives a module another tensor. torch.export follows that
in the outermost module alone, in the order of the assignments, of which one may read what another
has written meanwhile. Within a trace the tensors that were assigned are written, together and at
the end, into those that were there before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tvmbridge.core.errors import CaptureError
from tvmbridge.core.torch_private import export_trace
from tvmbridge.graph_capture.trace.patches import patched_here


@contextmanager
def exchanges_written(module: nn.Module) -> Iterator[None]:
    """After it ``module`` holds the buffers that it held before, with new values."""
    before = list(_buffers(module))
    yield
    exchanged = [held for held in before if held[1].get(held[2]) is not held[3]]
    # All are read before one is written: two may have been exchanged for each other.
    values = [_value(before, *held) for held in exchanged]
    for (_, place, key, tensor), value in zip(exchanged, values, strict=True):
        tensor.copy_(value)
        place[key] = tensor


_Place = dict[str, torch.Tensor | None]
_Held = tuple[str, _Place, str, torch.Tensor]


def _buffers(module: nn.Module) -> Iterator[_Held]:
    """The dotted names of all buffers, where they are held, under which key, and the tensors."""
    for path, owner in module.named_modules():
        for key, tensor in owner._buffers.items():
            if tensor is not None:
                yield f"{path}.{key}".removeprefix("."), owner._buffers, key, tensor


def _value(
    before: list[_Held], name: str, place: _Place, key: str, tensor: torch.Tensor
) -> torch.Tensor:
    """What is to be written into ``tensor``.

    Raises:
        CaptureError: no tensor like it has taken its place, or it is in another place too.
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
    """Within it torch.export does not look for exchanged buffers itself."""
    return patched_here(export_trace(), "register_buffer_assignment_hook", _no_hook)


def _no_hook(genuine: Callable[..., Any], *args: Any) -> RemovableHandle:
    return RemovableHandle(OrderedDict())
