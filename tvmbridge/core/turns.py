"""A lock by which threads compile one at a time: tracing changes process-wide state of PyTorch."""

from __future__ import annotations

import os

from tvmbridge.core.locks import Lock
from tvmbridge.core.torch_private import dynamo_lock, renew_dynamo_lock

os.register_at_fork(after_in_child=renew_dynamo_lock)


def compiling() -> Lock:
    """Return the compilation lock; the same thread may enter it again.

    It is TorchDynamo's own: TorchDynamo must not capture functions that a trace of another thread
    has replaced. A generator must not hold it: if a profiling function raises where a generator
    yields, CPython drops the generator without leaving its ``with`` blocks.
    """
    return Lock(over=dynamo_lock())


def another_compiles() -> bool:
    """Whether another thread is compiling now."""
    return compiling().held_elsewhere()
