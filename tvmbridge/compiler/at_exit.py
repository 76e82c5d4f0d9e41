"""Keep GPU code loaded when the process ends, since CUDA may shut down before the code is freed."""

from __future__ import annotations

import atexit
import ctypes
import functools
import weakref
from typing import Any

_loaded: weakref.WeakSet[Any] = weakref.WeakSet()


def stays_at_exit(module: Any) -> None:
    """Keep the code of ``module`` from being unloaded when the interpreter ends.

    TVM aborts the process if it unloads code after CUDA has shut down. The driver frees the code.
    """
    _register()
    _loaded.add(module)


@functools.cache
def _register() -> None:
    atexit.register(_pin)


def _pin() -> None:
    for module in _loaded:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
