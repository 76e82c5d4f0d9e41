"""All dispatchers of this process: what a fork leaves of them, and what its end tells of them."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

from tvmbridge.runtime.fallbacks import forget_summaries


class Registered(Protocol):
    """A dispatcher, as the process sees it."""

    def forget_fast(self) -> None:
        """Have the next call decided by the full guards."""

    def sum_up(self) -> None:
        """Have the end of the process tell of the calls so far: no more are to come."""


_registered: weakref.WeakSet[Registered] = weakref.WeakSet()


def register(dispatcher: Registered) -> None:
    """Count ``dispatcher`` among those of the process, as long as it lives."""
    _registered.add(dispatcher)


def _forget_after_fork() -> None:
    # The threads that compiled code runs on are not in the new process.
    for dispatcher in list(_registered):
        dispatcher.forget_fast()
    forget_summaries()


@atexit.register
def _keep_summaries() -> None:
    """Before those that were kept are logged: what is registered last runs first."""
    for dispatcher in list(_registered):
        dispatcher.sum_up()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
