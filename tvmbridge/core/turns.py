"""A lock by which threads compile one at a time: tracing changes process-wide state of PyTorch."""

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
    """Hold the compilation lock within this context; the same thread may enter it again.

    TorchDynamo is locked out of other threads too: it must not capture functions that a trace has
    replaced. Its lock is taken first, since tvmbridge may compile as a backend of TorchDynamo.
    """
    with dynamo_lock(), _lock:
        yield


def another_compiles() -> bool:
    """Whether another thread is compiling now."""
    if not _lock.acquire(blocking=False):
        return True
    _lock.release()
    return False
