"""A tuning run: tasks one after the other, in batches that are written before the next begins."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tvm
from rich.progress import Progress

from tvmbridge.records.allowed import trace_refusal
from tvmbridge.records.folder import FAILED_SECONDS, Folder, Record, TaskRecords, Verdict
from tvmbridge.records.meta import target_json
from tvmbridge.records.tasks import Task
from tvmbridge.schedules.target import core_count
from tvmbridge.tuning import measure, search
from tvmbridge.tuning.worker import Worker, WorkerError

logger = logging.getLogger(__name__)

_BATCH = 16
_FINALISTS = 3
_MOST_CALLS = 500
_CLEARLY_FASTER = 0.97  # a smaller gain may be measurement error
_MEASURE_SECONDS = 20.0
_SET_UP_SECONDS = 120.0
_SEARCH_SECONDS = 180.0


def default_trials(task: Task) -> int:
    """Return how many candidates to measure for a task, by the number of its blocks."""
    return min(256, 32 * max(1, math.ceil(task.size / 2)))


@dataclass(frozen=True)
class TaskOutcome:
    """The result of one task in one run.

    - ``task``: the task.
    - ``weight``: the number of calls.
    - ``verdict``: the verdict; None if the run had no time for the task.
    - ``wanted``: the number of candidates to measure, earlier runs included.
    - ``known``: whether an earlier run had already measured enough candidates.
    """

    task: Task
    weight: int
    verdict: Verdict | None
    wanted: int
    known: bool = False

    @property
    def done(self) -> bool:
        """Whether another run would find nothing to do."""
        return self.verdict is not None and _is_enough(self.verdict, self.wanted)

    def __str__(self) -> str:
        label = f"{self.task.label} (x{self.weight})"
        verdict = self.verdict
        if verdict is None:
            return f"{label}: out of time"
        if verdict.rule_seconds is None:
            return f"{label}: {verdict.reason}"
        rule = f"rule {verdict.rule_seconds * 1e6:.1f} µs"
        if not verdict.applies or verdict.seconds is None:
            return f"{label}: {rule}, {verdict.reason}; {verdict.trials} trials"
        return f"{label}: {rule}, tuned {verdict.seconds * 1e6:.1f} µs; {verdict.trials} trials"


def _is_enough(verdict: Verdict, wanted: int) -> bool:
    return verdict.finished or verdict.trials >= wanted


class Clock:
    """The deadline of a run: ``timeout`` seconds from now; None: no deadline."""

    def __init__(self, timeout: float | None) -> None:
        self._end = math.inf if timeout is None else time.monotonic() + timeout

    @property
    def over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self._end


@dataclass
class Tuner:
    """A tuning run with its two worker processes.

    - ``folder``: the folder that the run writes.
    - ``trials``: candidates to measure for each task; None: by the size of the task.
    - ``clock``: the deadline.
    - ``bar``: the progress bar.
    - ``searcher``: the process that proposes candidates.
    - ``measurer``: the process that compiles and times candidates.
    """

    folder: Folder
    trials: int | None
    clock: Clock
    bar: Progress
    searcher: Worker = field(init=False)
    measurer: Worker = field(init=False)

    def __post_init__(self) -> None:
        cores = core_count(self.folder.target)
        self.searcher, self.measurer = Worker(cores), Worker(cores)

    def close(self) -> None:
        """End the two worker processes."""
        self.searcher.close()
        self.measurer.close()

    def run(self, tasks: Mapping[Task, int]) -> list[TaskOutcome]:
        """Tune the tasks, and skip those that earlier runs tuned enough.

        The order is by calls times elements of the largest parameter, the largest first.
        """
        entries = self.folder.load()
        wanted = {
            task: default_trials(task) if self.trials is None else self.trials for task in tasks
        }
        trials = self.bar.add_task("", total=sum(wanted.values()))
        outcomes: list[TaskOutcome] = []
        for task, weight in sorted(tasks.items(), key=lambda item: -item[1] * item[0].elements):
            outcome = self._outcome(task, weight, entries.get(task), wanted[task])
            outcomes.append(outcome)
            self.bar.update(trials, completed=sum(wanted[o.task] for o in outcomes))
            logger.info("task %d of %d: %s", len(outcomes), len(tasks), outcome)
        return outcomes

    def _outcome(
        self, task: Task, weight: int, entry: TaskRecords | None, wanted: int
    ) -> TaskOutcome:
        verdict = entry.verdict if entry is not None else None
        if verdict is not None and _is_enough(verdict, wanted):
            return TaskOutcome(task, weight, verdict, wanted, known=True)
        if task.refusal is not None:
            reason = f"not tuned: {task.refusal}"
            return TaskOutcome(
                task, weight, Verdict(task.key, 0, None, None, None, True, reason), 0
            )
        if self.clock.over:
            return TaskOutcome(task, weight, None, wanted)
        # A process never unloads compiled code and grows with each call.
        for worker in (self.searcher, self.measurer):
            if worker.calls > _MOST_CALLS:
                worker.close()
        return TaskOutcome(task, weight, _TaskRun(self, task, entry, wanted).run(), wanted)


class _TaskRun:
    """The tuning of one task: time the kernel by rule, measure candidates, compare the best."""

    def __init__(self, tuner: Tuner, task: Task, entry: TaskRecords | None, wanted: int) -> None:
        self.tuner = tuner
        self.task = task
        self.wanted = wanted
        self.index, self.key = tuner.folder.add_task(task)
        self.records = list(entry.records) if entry is not None else []
        self.trials = entry.trials if entry is not None else 0
        self.module = tvm.ir.save_json(task.mod)
        self.target = str(tuner.folder.target)
        self.rule = math.inf
        self.finished = False
        self._set_up_at = -1

    def run(self) -> Verdict:
        """Search for a faster schedule, and write and return the verdict."""
        verdict = Verdict(self.key, self.trials, None, None, None)
        try:
            self._set_up()
        except WorkerError as error:
            verdict = replace(
                verdict,
                finished=not error.late,
                reason=f"the rule's kernel cannot be measured: {error}",
            )
        else:
            reason = self._search()
            verdict = self._judge(reason)
        self.tuner.folder.add_verdict(verdict)
        return verdict

    def _set_up(self) -> None:
        worker = self.tuner.measurer
        if not worker.running or self._set_up_at != worker.starts:
            seconds = worker.call(measure.set_up, self.module, self.target, timeout=_SET_UP_SECONDS)
            self.rule = min(self.rule, *seconds)
            self._set_up_at = worker.starts

    def _search(self) -> str:
        """Measure candidates until there are enough or the time is over.

        Returns:
            The reason if the search ended early, otherwise "".
        """
        history = [r for r in self.records if r.seconds < FAILED_SECONDS and self._usable(r)]
        earlier = [(r.trace, list(r.content[1])) for r in history]
        searcher = self.tuner.searcher
        seed = 1 + (self.task.hash + self.trials) % (2**31 - 2)
        left = self.wanted - self.trials
        try:
            searcher.call(
                search.start,
                self.module,
                self.target,
                earlier,
                left,
                min(_BATCH, left),
                seed,
                timeout=_SEARCH_SECONDS,
            )
            while self.trials < self.wanted and not self.tuner.clock.over:
                candidates = searcher.call(search.propose, timeout=_SEARCH_SECONDS)
                if not candidates:
                    self.finished = True
                    break
                results = self._measure_batch(candidates)
                self._write(candidates, results)
                if len(results) < len(candidates):
                    break
                if not self._any_success():
                    self.finished = True
                    return "no candidate ran and was right"
                searcher.call(search.learn, results, timeout=_SEARCH_SECONDS)
        except WorkerError as error:
            self.finished = not error.late
            return f"the search ended early: {error}"
        return ""

    def _usable(self, record: Record) -> bool:
        reason = trace_refusal(record.trace)
        if reason is not None:
            logger.warning("the record %s of %s: %s", record.digest, self.task.label, reason)
        return reason is None

    def _any_success(self) -> bool:
        return any(record.seconds < FAILED_SECONDS for record in self.records)

    def _measure_batch(self, candidates: Sequence[Any]) -> list[list[float]]:
        """Return the times of each candidate; only of the first ones if the time runs out."""
        results = []
        for candidate in candidates:
            if self.tuner.clock.over:
                break
            results.append(self._measure(*candidate))
        return results

    def _measure(self, module: str, trace: Any, arguments: Any) -> list[float]:
        """Return the measured times of a candidate in seconds; an empty list if it failed."""
        self._show()
        worker = self.tuner.measurer
        try:
            self._set_up()
            return list(worker.call(measure.measure, module, timeout=_MEASURE_SECONDS))
        except WorkerError as error:
            logger.debug("a candidate of %s: %s", self.task.label, error)
            return []
        finally:
            self.trials += 1
            self.tuner.bar.advance(self.tuner.bar.task_ids[0])

    def _show(self) -> None:
        best = min((r.seconds for r in self.records), default=math.inf)
        times = f"rule {self.rule * 1e6:.1f} µs, best {min(best, 1e3) * 1e6:.1f} µs"
        shown = times if best < FAILED_SECONDS else times.partition(",")[0]
        self.tuner.bar.update(
            self.tuner.bar.task_ids[0], description=f"{self.task.label:.40}: {shown}"
        )

    def _write(self, candidates: list[Any], results: list[list[float]]) -> None:
        target = target_json(self.tuner.folder.target)
        batch = [
            Record((trace, seconds or [FAILED_SECONDS], target, arguments))
            for (_, trace, arguments), seconds in zip(candidates, results, strict=False)
        ]
        self.tuner.folder.add_records(self.index, batch)
        self.records += batch

    def _judge(self, reason: str) -> Verdict:
        """Time the best records in turns with the kernel by rule, and return the verdict.

        ``reason``: why the search ended early, or "".
        """
        ran = sorted(
            (r for r in self.records if r.seconds < FAILED_SECONDS), key=lambda r: r.seconds
        )
        finalists = ran[:_FINALISTS]
        verdict = Verdict(
            self.key, self.trials, self.rule, None, None, self.finished, reason or "no candidate"
        )
        if not finalists:
            return verdict
        try:
            self._set_up()
            seconds = self.tuner.measurer.call(
                measure.race, [r.trace for r in finalists], timeout=_SET_UP_SECONDS
            )
        except WorkerError as error:
            return replace(verdict, reason=f"the best records could not be compared: {error}")
        rule = seconds[0]
        found = [(s, r) for s, r in zip(seconds[1:], finalists, strict=True) if s is not None]
        if not found:
            return replace(verdict, rule_seconds=rule, reason="the best records are wrong")
        best, record = min(found, key=lambda pair: pair[0])
        verdict = replace(verdict, rule_seconds=rule, seconds=best, reason="")
        if best >= _CLEARLY_FASTER * rule:
            return replace(verdict, reason=f"the rule is as fast (tuned {best * 1e6:.1f} µs)")
        return replace(verdict, schedule=record.digest)
