"""Count compilations by the log of tvmbridge."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class Compilations(logging.Handler):
    """Counts the compilations that the log reports, and keeps the reasons of those that failed."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.done = 0
        self.failed: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Count the compilation that a record reports."""
        text = record.getMessage()
        self.done += text.startswith("compiled ") and not text.startswith("compiled code:")
        if text.startswith("no code for any size"):
            self.failed.append(text)


@contextmanager
def counted() -> Iterator[Compilations]:
    """Count the compilations within the context; the log goes nowhere else."""
    log, handler = logging.getLogger("tvmbridge"), Compilations()
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield handler
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]
