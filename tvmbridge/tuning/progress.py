"""What a run of tuning shows: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import math
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

logger = logging.getLogger(__name__)


class TuningProgress:
    """Tasks done, the task at work, its best time so far, and the time left."""

    def __init__(self, tasks: int, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._shown = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.completed:.0f}/{task.total:.0f} tasks"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not self._shown,
        )
        self._bar = self._progress.add_task("", total=max(1, tasks), left="")
        self._tasks = tasks
        self._done = 0

    def __enter__(self) -> TuningProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(
        self, label: str, trials: int, wanted: int, rule: float, best: float, left: float
    ) -> None:
        """Show the state of the task at work; ``left`` is the rest of the run in seconds."""
        shown = f"{label[:40]}: {trials}/{wanted} trials, rule {_micro(rule)}, best {_micro(best)}"
        self._progress.update(
            self._bar,
            description=shown,
            completed=self._done + min(1.0, trials / max(1, wanted)),
            left="" if math.isinf(left) else f"{left:.0f} s left",
        )
        logger.debug("%s", shown)

    def finish(self, summary: str) -> None:
        """A task is over."""
        self._done += 1
        self._progress.update(self._bar, completed=self._done)
        logger.info("task %d of %d: %s", self._done, self._tasks, summary)


def _micro(seconds: float) -> str:
    return "-" if math.isinf(seconds) else f"{seconds * 1e6:.1f} µs"
