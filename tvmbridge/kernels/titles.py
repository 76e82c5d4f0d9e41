"""What kernels are called in the profiler."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tvmbridge.kernels.keys import spec_named

_NUMBERED = re.compile(r"(?<=[a-z])\d+(?=_|$)")


def title(symbol: str, arguments: Sequence[Any]) -> str | None:
    """The name of the kernel that a VirtualMachine calls by ``symbol``; None: it is none.

    Fused functions are named by their operators, PyTorch's kernels by the overload.
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
