"""The parent process: give entries to worker processes, and replace workers that crash."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.processes import in_threads

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Entry:
    """One operator in one dtype and mode.

    ``mode`` is ``forward``, or the source of the joint function that computes the gradient:
    ``auto``, ``relax`` or ``aot``.
    """

    name: str
    dtype: str
    mode: str = "forward"

    def __str__(self) -> str:
        return f"{self.name}/{self.dtype}/{self.mode}"


@dataclass
class Settings:
    """The settings of a run.

    - ``limit``: the most samples of an entry; 0 for all.
    - ``group_size``: how many cases are compiled as one module.
    - ``timeout``: seconds for one group of cases.
    - ``workers``: the number of worker processes.
    - ``admit``: whether the compiler may use unproven claims too.
    - ``special``: whether cases are filled with special values.
    - ``accuracy``: whether errors are compared with eager's errors.
    - ``dynamic``: whether cases are compiled for any number of rows.
    - ``deadline``: the value of ``time.monotonic()`` after which no entry is started.
    """

    limit: int = 0
    group_size: int = 8
    timeout: float = 120.0
    workers: int = 1
    admit: bool = False
    special: bool = False
    accuracy: bool = False
    dynamic: bool = False
    deadline: float = float("inf")


@dataclass
class Progress:
    """The reports of the workers about one entry.

    - ``labels``: the cases of the entry; None until a worker has listed the cases.
    - ``group``: the cases that a worker is running.
    - ``outcomes``: the finished cases.
    - ``eager``: the case that eager PyTorch is running; None if it runs none.
    - ``left_out``: the cases in which eager PyTorch crashed the worker.
    """

    labels: list[str] | None = None
    group: list[str] = field(default_factory=list)
    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)
    eager: str | None = None
    left_out: list[str] = field(default_factory=list)

    def left(self) -> list[str] | None:
        """Return the labels without an outcome; None while the labels are unknown."""
        return None if self.labels is None else [x for x in self.labels if x not in self.outcomes]


class WorkerDied(Exception):
    """The worker crashed, or took too long and was killed; the message has the details."""

    result = "crash"


class WorkerHung(WorkerDied):
    """The worker took too long and was killed."""

    result = "timeout"


def _search_path() -> str:
    """Return the PYTHONPATH of workers: the repository, then the caller's own PYTHONPATH."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


class Worker:
    """A worker process that runs ``module``; tasks and outcomes pass as JSON lines."""

    def __init__(self, module: str = "tests.conformance.worker") -> None:
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115  (lives with the worker)
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": _search_path()},
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def run(self, task: dict[str, Any], timeout: float) -> Iterator[dict[str, Any]]:
        """Yield the worker's lines for one task.

        Raises:
            WorkerDied: the worker ended, or wrote nothing for ``timeout`` seconds, before the task
                was done.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerDied(self._last_words()) from error
        while True:
            try:
                line = self._lines.get(timeout=timeout)
            except queue.Empty:
                self.close()
                raise WorkerHung(f"nothing for {timeout:.0f} s") from None
            if line is None:
                raise WorkerDied(self._last_words())
            content = json.loads(line)
            if content.get("done"):
                return
            yield content

    def _last_words(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        tail = self._errors.read()[-1500:]
        return f"exit status {code}: {tail}"

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()


def _run_entry(entry: Entry, settings: Settings, worker: Worker) -> tuple[dict[str, Any], Worker]:
    """Return all outcomes of one entry, and the worker to use next: a new one after a crash."""
    progress = Progress()
    group_size = settings.group_size
    while True:
        task = {
            "name": entry.name,
            "dtype": entry.dtype,
            "mode": entry.mode,
            "admit": settings.admit,
            "special": settings.special,
            "accuracy": settings.accuracy,
            "dynamic": settings.dynamic,
            "limit": settings.limit,
            "group_size": group_size,
            "labels": progress.left(),
            "left_out": progress.left_out,
        }
        try:
            for line in worker.run(task, settings.timeout):
                _take(progress, line)
            return progress.outcomes, worker
        except WorkerDied as death:
            worker.close()
            worker = Worker()
            if progress.eager is not None:
                # PyTorch's own kernel crashed on this variant of a sample.
                progress.left_out.append(progress.eager)
                progress.eager = None
                continue
            lonely = len(progress.group) == 1
            if lonely or not progress.group:
                label = progress.group[0] if lonely else "samples"
                progress.outcomes[label] = _death(label, death)
            if progress.labels is None or not progress.left():
                return progress.outcomes, worker
            group_size = 1
            progress.group = []


def _take(progress: Progress, line: dict[str, Any]) -> None:
    if "group" in line:
        progress.group = line["group"]
    elif "eager" in line:
        progress.eager = line["eager"]
    elif "cases" in line:
        progress.eager = None
        if progress.labels is None:
            progress.labels = line["cases"]
    else:
        progress.outcomes[line["outcome"]["label"]] = line["outcome"]


def _death(label: str, death: WorkerDied) -> dict[str, Any]:
    outcome = {"label": label, "result": death.result, "reason": str(death), "joint": ""}
    return {**outcome, "ordinary": True, "native": [], "aten": [], "used": {}}


def run_entries(
    entries: Sequence[Entry],
    settings: Settings,
    record: Callable[[Entry, dict[str, Any]], None],
) -> None:
    """Run ``entries`` on ``settings.workers`` processes; ``record`` gets the outcomes of each."""
    lock = threading.Lock()

    def serve(taken: Iterator[Entry]) -> None:
        worker = Worker()
        try:
            for entry in taken:
                if time.monotonic() >= settings.deadline:
                    return
                outcomes, worker = _run_entry(entry, settings, worker)
                with lock:
                    record(entry, outcomes)
        finally:
            worker.close()

    in_threads(entries, serve, settings.workers)
