"""Progress: one line on a terminal while a compilation takes long."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tvmbridge.compiler.cached_build import disk_text
from tvmbridge.core.locks import Lock

# Seconds before the line appears, so that shorter compilations show nothing.
PATIENCE = 2.0


@contextmanager
def progress(what: str, why: str = "") -> Iterator[Callable[[str], None]]:
    """Show a progress line on the terminal inside this context.

    The line has the work, its stage, how much code came from disk, and the reason. It appears
    after ``PATIENCE`` seconds and disappears at the end. If standard error is not a terminal,
    nothing is shown.

    Yields:
        A function to be called with the name of each stage as it begins.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda stage: None
        return
    line = _ProgressLine(what, why)
    timer = threading.Timer(PATIENCE, line.show)
    timer.daemon = True
    timer.start()
    try:
        yield line.stage
    finally:
        timer.cancel()
        line.close()


class _ProgressLine:
    """A progress line; a timer's thread shows it, the compiling thread updates and closes it."""

    def __init__(self, what: str, why: str) -> None:
        self._what, self._stage, self._why = what, "", why
        self._width = 0
        self._status: Any = None
        self._closed = False
        self._changing = Lock()

    def show(self) -> None:
        from rich.console import Console
        from rich.status import Status

        with self._changing:
            if not self._closed:
                console = Console(stderr=True)
                self._width = console.width - 4  # the spinner takes the rest
                self._status = Status(self._text(), console=console)
                self._status.start()

    def stage(self, name: str) -> None:
        with self._changing:
            self._stage = f": {name}"
            if self._status is not None:
                self._status.update(self._text())

    def _text(self) -> Any:
        from rich.text import Text

        found = disk_text()
        disk = f" (code so far: {found})" if found else ""
        # Longer text would wrap into a second line.
        return Text(f"{self._what}{self._stage}{disk}{self._why}"[: self._width])

    def close(self) -> None:
        with self._changing:
            self._closed = True
            if self._status is not None:
                self._status.stop()
