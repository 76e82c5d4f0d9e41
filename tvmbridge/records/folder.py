"""The folder of one target: MetaSchedule's database, and a verdict for each tuned task.

``database_workload.json`` and ``database_tuning_record.json`` are in MetaSchedule's own format.
``verdicts.json`` has one line, a verdict, for each finished tuning of a task. A verdict compares
records with the kernel by rule, which is the function as tvmbridge's rules schedule it without a
record. It names the record that was correct and faster, if any. Only a record that a verdict names
is ever applied.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tvm.target import Target

from tvmbridge.core.errors import BridgeError, first_line
from tvmbridge.records.jsonlines import append_lines, locked, read_lines
from tvmbridge.records.meta import NAME as META
from tvmbridge.records.meta import Meta, read_meta, target_json, target_name, write_meta
from tvmbridge.records.tasks import Task, parse_workload, workload_key

logger = logging.getLogger(__name__)

WORKLOADS = "database_workload.json"
RECORDS = "database_tuning_record.json"
VERDICTS = "verdicts.json"
_MOST_TRIALS = 2**31
FAILED_SECONDS = 1e10  # MetaSchedule's time for a candidate that did not run


@dataclass(frozen=True)
class Verdict:
    """The result of tuning one task.

    - ``task``: the key of the task.
    - ``trials``: the number of candidates measured, earlier runs included.
    - ``rule_seconds``: the time of the kernel by rule, which is used without a record; None if that
      kernel did not run.
    - ``schedule``: the digest of the record that is correct and faster than the rule, or None.
    - ``seconds``: the time of the best record, measured in turns with the kernel by rule; None if
      no record could be compared.
    - ``finished``: whether there is nothing left to try, whatever the number of trials.
    - ``reason``: why there is no record to apply; "" if there is one.
    """

    task: str
    trials: int
    rule_seconds: float | None
    schedule: str | None
    seconds: float | None
    finished: bool = False
    reason: str = ""

    @property
    def applies(self) -> bool:
        """Whether the verdict names a record that is faster than the rule."""
        return (
            self.schedule is not None
            and self.seconds is not None
            and self.rule_seconds is not None
            and self.seconds < self.rule_seconds
        )

    @staticmethod
    def parse(value: Any) -> Verdict | None:
        """Return the verdict of a parsed JSON line; None if the line is no valid verdict."""
        try:
            verdict = Verdict(**value)
        except TypeError:
            return None
        times = (verdict.rule_seconds, verdict.seconds)
        valid = (
            isinstance(verdict.task, str)
            and isinstance(verdict.schedule, str | None)
            and isinstance(verdict.reason, str)
            and isinstance(verdict.finished, bool)
            and type(verdict.trials) is int
            and 0 <= verdict.trials < _MOST_TRIALS
            and all(seconds is None or _is_duration(seconds) for seconds in times)
        )
        return verdict if valid else None


@dataclass(frozen=True)
class Record:
    """One measured schedule.

    - ``content``: MetaSchedule's trace, times in seconds, target and arguments, all in JSON form.
    """

    content: tuple[Any, Any, Any, Any]

    @property
    def trace(self) -> Any:
        """The scheduling steps, as MetaSchedule's trace in JSON form."""
        return self.content[0]

    @property
    def seconds(self) -> float:
        """The shortest measured time; :data:`FAILED_SECONDS` if there is none."""
        return min((float(s) for s in self.content[1] or ()), default=FAILED_SECONDS)

    @property
    def digest(self) -> str:
        """A digest of the trace, by which a verdict names the record."""
        text = json.dumps(self.trace, separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @staticmethod
    def parse(value: Any, target: dict[str, Any]) -> tuple[int, Record] | None:
        """Return the workload index and record of a line; None if invalid or of another target."""
        if not (isinstance(value, list) and len(value) == 2 and type(value[0]) is int):
            return None
        content = value[1]
        if not (isinstance(content, list) and len(content) == 4 and isinstance(content[2], dict)):
            return None
        seconds = content[1]
        if not isinstance(seconds, list) or not all(map(_is_duration, seconds)):
            return None
        mine = {name: content[2].get(name) for name in target}
        return (value[0], Record(tuple(content))) if mine == target else None


def _is_duration(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= FAILED_SECONDS and math.isfinite(value)


@dataclass
class TaskRecords:
    """The content of a folder that concerns one task.

    - ``task``: the task.
    - ``names``: the keys by which the files of the folder name it.
    - ``records``: the measured schedules.
    - ``verdict``: the latest verdict; None if the tuning has not finished.
    - ``source``: the folder; None after records of several folders were merged.
    """

    task: Task
    names: set[str]
    records: list[Record]
    verdict: Verdict | None = None
    source: Path | None = None

    @property
    def chosen(self) -> Record | None:
        """The record to apply; None if no verdict names one."""
        verdict = self.verdict
        if verdict is None or not verdict.applies:
            return None
        return next((r for r in self.records if r.digest == verdict.schedule), None)

    @property
    def trials(self) -> int:
        """The number of candidates measured so far."""
        return max(len(self.records), self.verdict.trials if self.verdict else 0)


class Folder:
    """The folder with the records of one target, below a log directory."""

    def __init__(self, path: Path, target: Target) -> None:
        self.path = path
        self.target = target

    @staticmethod
    def below(log_dir: str | Path, target: Target) -> Folder:
        """Return the folder of ``target`` in ``log_dir``; it need not exist."""
        return Folder(Path(log_dir) / target_name(target), target)

    @property
    def exists(self) -> bool:
        """Whether the folder has a file of tasks."""
        return (self.path / WORKLOADS).is_file()

    def refusal(self) -> str | None:
        """Return why the records may not be applied; None if they may."""
        meta = read_meta(self.path)
        return meta if isinstance(meta, str) else meta.refusal(self.target)

    def open_for_writing(self) -> None:
        """Create the folder and its META.json, or check that an existing folder fits.

        Raises:
            BridgeError: the folder is for another target or TVM version, or cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with locked(self.path):
                if not (self.path / META).exists() and not self.exists:
                    write_meta(self.path, Meta.of(self.target))
        except OSError as error:
            raise BridgeError(
                f"{self.path} cannot be written ({error}); name another log_dir"
            ) from error
        reason = self.refusal()
        if reason is not None:
            raise BridgeError(
                f"records cannot be added to {self.path}: {reason}; name another log_dir, or "
                "move the folder away"
            )

    def load(self) -> dict[Task, TaskRecords]:
        """Read the records and the verdict of each task; skip damaged lines with a warning."""
        by_line = self._tasks_by_line()
        entries: dict[Task, TaskRecords] = {}
        for named in by_line:
            if named is not None:
                entry = entries.setdefault(
                    named[0], TaskRecords(named[0], set(), [], None, self.path)
                )
                entry.names.add(named[1])
        wanted = target_json(self.target)
        skipped: list[int] = []
        for number, value in enumerate(read_lines(self.path / RECORDS), 1):
            parsed = Record.parse(value, wanted)
            named = by_line[parsed[0]] if parsed and 0 <= parsed[0] < len(by_line) else None
            if parsed is not None and named is not None:
                entries[named[0]].records.append(parsed[1])
            elif value is not None:
                skipped.append(number)
        if skipped:
            logger.warning(
                "%s: %d lines are no records for this target, or of no known task; they were "
                "skipped: %s",
                self.path / RECORDS,
                len(skipped),
                ", ".join(map(str, skipped[:8])) + (", ..." if len(skipped) > 8 else ""),
            )
        by_name = {name: entry for entry in entries.values() for name in entry.names}
        for number, value in enumerate(read_lines(self.path / VERDICTS), 1):
            verdict = Verdict.parse(value)
            if verdict is None and value is not None:
                logger.warning(
                    "%s, line %d is no verdict and was skipped", self.path / VERDICTS, number
                )
            if verdict is not None and verdict.task in by_name:
                by_name[verdict.task].verdict = verdict
        return entries

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Hold the lock of the folder during a write.

        Raises:
            BridgeError: the write raised an OSError, for example because the disk is full.
        """
        try:
            with locked(self.path):
                yield
        except OSError as error:
            raise BridgeError(
                f"{self.path} cannot be written any more ({error}); what was measured before is "
                "kept, and the next run goes on from there"
            ) from error

    def _tasks_by_line(self) -> list[tuple[Task, str] | None]:
        path = self.path / WORKLOADS
        lines = enumerate(read_lines(path), 1)
        return [_parsed_workload(value, f"{path}, line {number}") for number, value in lines]

    def add_task(self, task: Task) -> tuple[int, str]:
        """Append ``task`` if the folder lacks it; return the line index and key of the task."""
        with self._written():
            lines = self._tasks_by_line()
            for index, named in enumerate(lines):
                if named is not None and named[0] == task:
                    return index, named[1]
            append_lines(self.path / WORKLOADS, [task.workload])
            return len(lines), task.key

    def add_records(self, index: int, records: Sequence[Record]) -> None:
        """Append measured schedules of the task at line index ``index``."""
        with self._written():
            append_lines(self.path / RECORDS, [[index, list(r.content)] for r in records])

    def add_verdict(self, verdict: Verdict) -> None:
        """Append a verdict, which replaces earlier verdicts of the same task."""
        with self._written():
            append_lines(self.path / VERDICTS, [asdict(verdict)])


def _parsed_workload(value: Any, place: str) -> tuple[Task, str] | None:
    if value is None:
        return None
    try:
        structural, encoded = map(str, value)
        return parse_workload(encoded), workload_key([structural, encoded])
    except Exception as error:  # TVM raises no narrower class for malformed JSON
        logger.warning(
            "%s is no function to schedule and was skipped: %s", place, first_line(error)
        )
        return None
