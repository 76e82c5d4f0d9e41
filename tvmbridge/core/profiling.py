"""Regions for ``torch.profiler``; where it is off they cost a look at one flag."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler

_OFF = nullcontext()


def profiling() -> bool:
    """Whether the profiler records."""
    return profiler._is_profiler_enabled


def region(name: str) -> AbstractContextManager[Any]:
    """A region ``tvmbridge::name`` of the profiler, if it records."""
    if not profiler._is_profiler_enabled:
        return _OFF
    return torch.profiler.record_function(f"tvmbridge::{name}")


@contextmanager
def kernels_told(machine: Any, title: Callable[[str, Any], str | None]) -> Iterator[None]:
    """Within it each kernel that ``machine`` calls is a region.

    Args:
        machine: a VirtualMachine.
        title: names a kernel by its symbol and arguments; None: it is none.
    """
    tell = getattr(machine, "set_instrument", None)
    if tell is None:
        yield
        return
    begun: list[Any] = []

    def told(_: Any, symbol: str, before: bool, result: Any, *arguments: Any) -> int:
        name = title(symbol, arguments)
        if name is not None and before:
            begun.append(torch.profiler.record_function(name))
            begun[-1].__enter__()
        elif name is not None:
            begun.pop().__exit__(None, None, None)
        return 0  # go on

    tell(told)
    try:
        yield
    finally:
        tell(None)
        while begun:  # the kernel has raised
            begun.pop().__exit__(None, None, None)
