"""The folder of one target: MetaSchedule's database, and what each task's tuning came to.

``database_workload.json`` and ``database_tuning_record.json`` are in MetaSchedule's own format.
``verdicts.json`` has a line for each time that the tuning of a task came to an end: how fast the
rule's kernel is on the same machine, and which record was found to be right and faster. Only a
record that a verdict names is ever applied.
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
FAILED_SECONDS = 1e10  # MetaSchedule's sign for a candidate that did not run


@dataclass(frozen=True)
class Verdict:
    """What tuning a task came to.

    Args:
        task: the key of the task.
        trials: candidates measured in all, also by earlier runs.
        rule_seconds: the time of the kernel that is used without a record; None: it did not run.
        schedule: digest of the record that is right and faster than the rule, or None.
        seconds: the time of that record, measured in turns with the rule's.
        finished: there is nothing left to try, whatever the number of trials.
        reason: why there is no record to apply.
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
        """Whether the record that it names is to be used."""
        return (
            self.schedule is not None
            and self.seconds is not None
            and self.rule_seconds is not None
            and self.seconds < self.rule_seconds
        )

    @staticmethod
    def parse(value: Any) -> Verdict | None:
        """A verdict from its JSON, None where it is none."""
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
    """One measured schedule, as JSON: MetaSchedule's trace, seconds, target, arguments."""

    content: tuple[Any, Any, Any, Any]

    @property
    def trace(self) -> Any:
        """The scheduling steps."""
        return self.content[0]

    @property
    def seconds(self) -> float:
        """The shortest measured time, :data:`FAILED_SECONDS` where there is none."""
        return min((float(s) for s in self.content[1] or ()), default=FAILED_SECONDS)

    @property
    def digest(self) -> str:
        """What the schedule is called in a verdict."""
        text = json.dumps(self.trace, separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @staticmethod
    def parse(value: Any, target: dict[str, Any]) -> tuple[int, Record] | None:
        """A line's workload index and record, None where it is none or of another target."""
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
    """All that a folder knows of a task; ``names`` are the keys by which files call it."""

    task: Task
    names: set[str]
    records: list[Record]
    verdict: Verdict | None = None
    source: Path | None = None

    @property
    def chosen(self) -> Record | None:
        """The record to apply, if there is one."""
        verdict = self.verdict
        if verdict is None or not verdict.applies:
            return None
        return next((r for r in self.records if r.digest == verdict.schedule), None)

    @property
    def trials(self) -> int:
        """Candidates measured so far."""
        return max(len(self.records), self.verdict.trials if self.verdict else 0)


class Folder:
    """One target's folder below a log directory."""

    def __init__(self, path: Path, target: Target) -> None:
        self.path = path
        self.target = target

    @staticmethod
    def below(log_dir: str | Path, target: Target) -> Folder:
        """The folder of ``target`` in ``log_dir``; it need not exist."""
        return Folder(Path(log_dir) / target_name(target), target)

    @property
    def exists(self) -> bool:
        """Whether there is anything to read."""
        return (self.path / WORKLOADS).is_file()

    def refusal(self) -> str | None:
        """Why the records may not be applied; None if they may."""
        meta = read_meta(self.path)
        return meta if isinstance(meta, str) else meta.refusal(self.target)

    def open_for_writing(self) -> None:
        """Create the folder and its META.json, or see that they fit.

        Raises:
            BridgeError: it is of another target or TVM, or cannot be written.
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
        """What is known of each task; damaged lines are skipped, each with a warning."""
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
        """Within it the folder is locked.

        Raises:
            BridgeError: it cannot be written, as on a full disk.
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
        """The line number and the key of ``task`` in the folder, appended if it was missing."""
        with self._written():
            lines = self._tasks_by_line()
            for index, named in enumerate(lines):
                if named is not None and named[0] == task:
                    return index, named[1]
            append_lines(self.path / WORKLOADS, [task.workload])
            return len(lines), task.key

    def add_records(self, index: int, records: Sequence[Record]) -> None:
        """Append measured schedules of the task in line ``index``."""
        with self._written():
            append_lines(self.path / RECORDS, [[index, list(r.content)] for r in records])

    def add_verdict(self, verdict: Verdict) -> None:
        """Append what tuning a task came to; later lines count."""
        with self._written():
            append_lines(self.path / VERDICTS, [asdict(verdict)])


def _parsed_workload(value: Any, place: str) -> tuple[Task, str] | None:
    if value is None:
        return None
    try:
        structural, encoded = map(str, value)
        return parse_workload(encoded), workload_key([structural, encoded])
    except Exception as error:  # TVM has no narrower class for what it cannot parse
        logger.warning(
            "%s is no function to schedule and was skipped: %s", place, first_line(error)
        )
        return None
