"""Find the Python module that called a function which a mode or a patch replaces."""

from __future__ import annotations

import sys
from types import FrameType

# Functions that pass on the call of a PyTorch function.
_PASSING = ("__torch_function__", "handle_torch_function")


def calling_python_module(depth: int, passing: str = "") -> str | None:
    """Return the name of the Python module whose function is ``depth`` frames above the caller.

    From there on, frames of ``__torch_function__`` and of functions named ``passing`` are skipped.
    Return None if no frame is left.
    """
    frame: FrameType | None = sys._getframe(depth + 1)
    while frame is not None and frame.f_code.co_name in (*_PASSING, passing):
        frame = frame.f_back
    return None if frame is None else str(frame.f_globals.get("__name__"))
