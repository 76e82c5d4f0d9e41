"""The autocast state: code is compiled for one state, and forward is traced under it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

import torch

# The devices for which autocast is on, with the dtype that it casts to on each.
Autocast: TypeAlias = tuple[tuple[str, torch.dtype], ...]

_DEVICES = ("cpu", "cuda")


def autocast_now() -> Autocast:
    """Return the autocast state of this thread."""
    return tuple((d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d))


@contextmanager
def without_autocast() -> Iterator[None]:
    """Turn autocast off within this context; compiled code always runs so.

    This is no ``torch.autocast`` region and does not count as one in PyTorch's nesting. A region
    inside it can therefore still clear its cached casts of weights when it ends.
    """
    before = autocast_now()
    try:
        for device, _ in before:
            torch.set_autocast_enabled(device, False)
        yield
    finally:
        for device, _ in before:
            torch.set_autocast_enabled(device, True)


@contextmanager
def under_autocast(state: Autocast) -> Iterator[None]:
    """Turn autocast on for the devices in ``state`` within this context; it must be off before.

    The cache of cast weights is off: later calls would find the fake tensors of a trace in it.
    """
    with ExitStack() as stack:
        for device, dtype in state:
            stack.enter_context(torch.autocast(device, dtype, cache_enabled=False))
        yield
