"""Compilations take turns: tracing uses state of PyTorch that belongs to the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tvmbridge.core.torch_private import dynamo_lock, renew_dynamo_lock

_lock = threading.RLock()


def _renew_locks() -> None:
    global _lock
    _lock = threading.RLock()
    renew_dynamo_lock()


os.register_at_fork(after_in_child=_renew_locks)


@contextmanager
def compiling() -> Iterator[None]:
    """Within it no other thread compiles; it may be entered again within itself.

    TorchDynamo waits in other threads: it must not capture functions that a trace has replaced.
    Its lock is taken first, since a backend of TorchDynamo may compile as well.
    """
    with dynamo_lock(), _lock:
        yield


def another_compiles() -> bool:
    """Whether another thread compiles at this time."""
    if not _lock.acquire(blocking=False):
        return True
    _lock.release()
    return False
