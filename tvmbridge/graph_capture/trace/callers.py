"""The Python module that calls a function which a mode or a patch replaces."""

from __future__ import annotations

import sys
from types import FrameType

# Functions that hand a call of PyTorch's on.
_PASSING = ("__torch_function__", "handle_torch_function")


def calling_python_module(depth: int, passing: str = "") -> str | None:
    """The name of the Python module whose function is ``depth`` calls above the one that asks.

    Frames of ``__torch_function__``, and of functions called ``passing``, are skipped.
    """
    frame: FrameType | None = sys._getframe(depth + 1)
    while frame is not None and frame.f_code.co_name in (*_PASSING, passing):
        frame = frame.f_back
    return None if frame is None else str(frame.f_globals.get("__name__"))
