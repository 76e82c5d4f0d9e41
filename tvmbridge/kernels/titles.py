"""The names of compiled kernels in PyTorch's profiler."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tvmbridge.kernels.callbacks import callback
from tvmbridge.kernels.keys import spec_named

_NUMBERED = re.compile(r"(?<=[a-z])\d+(?=_|$)")


def title(symbol: str, arguments: Sequence[Any]) -> str | None:
    """Return the display name of the kernel that a VirtualMachine calls by ``symbol``.

    A fused function is named by its operators, a PyTorch kernel by its overload. None if ``symbol``
    is no kernel.
    """
    if symbol.startswith("vm."):
        return None
    if not symbol.startswith("tvmbridge."):
        return _NUMBERED.sub("", symbol).replace("_tir_", "_").removeprefix("tir_")
    key = next((a for a in arguments if isinstance(a, str)), "")
    try:
        spec = json.loads(spec_named(key))
    except ValueError:
        return symbol
    return str(spec.get("op", symbol)) if isinstance(spec, dict) else symbol


@contextmanager
def kernels_told(machine: Any) -> Iterator[None]:
    """Make the profiler show each kernel that ``machine``, a VirtualMachine, calls."""
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

    try:
        tell(callback(told))
        yield
    finally:
        tell(None)
        while begun:  # ranges stay open if a kernel raises
            begun.pop().__exit__(None, None, None)
