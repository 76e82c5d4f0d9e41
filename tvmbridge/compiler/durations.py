"""Measure how long each stage of a compilation takes, and notify a listener when one begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

from tvmbridge.core.profiling import region
from tvmbridge.core.set_within import set_within

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


def stages_told_to(listener: Callable[[str], None]) -> AbstractContextManager[object]:
    """Call ``listener`` with the name of each stage that this thread begins in this context."""
    return set_within(_listener, listener)


class StageDurations:
    """The wall-clock duration of each compilation stage, in seconds by the name of the stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        listener = _listener.get()
        if listener is not None:
            listener(stage)
        start = time.perf_counter()
        try:
            with region(f"compile: {stage}"):
                yield
        finally:
            self.seconds[stage] = time.perf_counter() - start
