"""Code on a GPU at the end of the process: it stays, since CUDA may be gone before it is."""

from __future__ import annotations

import atexit
import ctypes
import functools
import weakref
from typing import Any

_loaded: weakref.WeakSet[Any] = weakref.WeakSet()


def stays_at_exit(module: Any) -> None:
    """Keep what ``module`` holds from being unloaded once the interpreter ends.

    TVM aborts the process where it unloads code after CUDA's own end. The driver frees all of it.
    """
    _register()
    _loaded.add(module)


@functools.cache
def _register() -> None:
    atexit.register(_pin)


def _pin() -> None:
    for module in _loaded:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
