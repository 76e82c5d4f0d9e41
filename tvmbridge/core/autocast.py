"""The state of autocast, which code is compiled for and which traces of forward run under."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

import torch

# The devices for which autocast is on, with the dtype that it casts to on each.
Autocast: TypeAlias = tuple[tuple[str, torch.dtype], ...]

_DEVICES = ("cpu", "cuda")


def autocast_now() -> Autocast:
    """The state of this thread."""
    return tuple((d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d))


@contextmanager
def without_autocast() -> Iterator[None]:
    """Within it autocast is off, as it is wherever compiled code runs.

    It is no region of ``torch.autocast``: the casts of weights that one within it keeps are
    forgotten when that ends.
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
    """Within it autocast is on for the devices in ``state``, where it was off for all.

    Casts of weights are not kept: the fake ones of a trace would be found by calls.
    """
    with ExitStack() as stack:
        for device, dtype in state:
            stack.enter_context(torch.autocast(device, dtype, cache_enabled=False))
        yield
