"""Compilations take turns: tracing uses state of PyTorch that belongs to the process."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager

_lock = threading.RLock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def compiling() -> AbstractContextManager[object]:
    """Within it no other thread compiles; it may be entered again within itself."""
    return _lock
