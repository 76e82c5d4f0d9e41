"""A registry of this process's dispatchers, which are cleared at a fork and summed up at exit."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

from tvmbridge.runtime.fallbacks import forget_summaries


class ForgottenPaths(Protocol):
    """Fast paths, which are dropped at a fork."""

    def forget(self) -> None:
        """Drop the fast paths, so that the full guards check the next call."""


class Registered(Protocol):
    """The part of a dispatcher that this registry calls."""

    @property
    def paths(self) -> ForgottenPaths:
        """The fast paths of the dispatcher."""

    def sum_up(self) -> None:
        """Keep a summary of the calls, which is logged at the end of the process."""


_registered: weakref.WeakSet[Registered] = weakref.WeakSet()


def register(dispatcher: Registered) -> None:
    """Add ``dispatcher`` to the registry, which holds it by a weak reference."""
    _registered.add(dispatcher)


def _forget_after_fork() -> None:
    # The threads that compiled code runs on do not exist in the new process.
    for dispatcher in list(_registered):
        dispatcher.paths.forget()
    forget_summaries()


@atexit.register
def _keep_summaries() -> None:
    """Keep the summaries of all dispatchers that are alive at exit.

    Functions registered with :mod:`atexit` run in reverse order, so this one runs before
    :func:`~.fallbacks.log_summaries`.
    """
    for dispatcher in list(_registered):
        dispatcher.sum_up()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
