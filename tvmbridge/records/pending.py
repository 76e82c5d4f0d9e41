"""The list of tasks that compilation has found without a verdict, to be tuned later."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tvm

from tvmbridge.core.errors import first_line
from tvmbridge.core.own_files import replace_file
from tvmbridge.records.folder import Folder
from tvmbridge.records.jsonlines import append_lines, locked, read_lines
from tvmbridge.records.library import named_log_dir
from tvmbridge.records.tasks import Task, parse_workload

logger = logging.getLogger(__name__)

NAME = "pending.json"
MOST_TASKS = 2000
MOST_BYTES = 64_000_000
_MOST_CALLS = 2**31


@dataclass(frozen=True)
class Pending:
    """A task on the list of tasks to tune.

    - ``task``: the task.
    - ``weight``: the number of calls in the compiled module.
    - ``origin``: the module that it was found in, for people.
    """

    task: Task
    weight: int
    origin: str


def read_pending(folder: Folder) -> list[Pending]:
    """Return the listed tasks, the most often called first, without damaged lines or duplicates."""
    found: dict[Task, Pending] = {}
    path = folder.path / NAME
    for number, value in enumerate(read_lines(path), 1):
        pending = _parse(value, f"{path}, line {number}")
        if pending is not None and pending.task not in found:
            found[pending.task] = pending
    return sorted(found.values(), key=lambda p: -p.weight)


def _parse(value: Any, place: str) -> Pending | None:
    if value is None:
        return None
    try:
        _, encoded = value["task"]
        task = parse_workload(str(encoded))
        return Pending(task, min(int(value["weight"]), _MOST_CALLS), str(value["origin"]))
    except Exception as error:  # TVM raises no narrower class for malformed JSON
        logger.warning("%s is no task and was skipped: %s", place, first_line(error))
        return None


def note_missing(
    missing: Mapping[Task, int], log_dir: str | None, target: tvm.target.Target, origin: str
) -> None:
    """Add untuned tasks to the list in the user's log directory, if the user named one.

    Args:
        origin: the module that the tasks were found in, for people.
    """
    directory = named_log_dir(log_dir)
    if directory is None or not missing:
        return
    folder = Folder.below(directory, target)
    noted = note_pending(folder, missing, origin)
    logger.info("%d kernels without a tuning record are pending in %s", noted, folder.path)


def note_pending(folder: Folder, tasks: Mapping[Task, int], origin: str) -> int:
    """Add the tasks that the list lacks; return how many of ``tasks`` are then on the list.

    Never raise: if the list cannot be written, log a warning and return 0.
    """
    try:
        folder.open_for_writing()
        with locked(folder.path):
            known = {pending.task for pending in read_pending(folder)}
            path = folder.path / NAME
            size = path.stat().st_size if path.exists() else 0
            new = [t for t in tasks if t not in known and t.refusal is None]
            room = max(0, MOST_TASKS - len(known)) if size < MOST_BYTES else 0
            lines = [_line(Pending(task, tasks[task], origin)) for task in new[:room]]
            if lines:
                append_lines(path, lines)
    except Exception as error:  # A broken list must not fail the compilation.
        logger.warning("tasks without a record could not be noted: %s", error)
        return 0
    if len(new) > room:
        logger.warning("%s is full: work it off with `tvmbridge tune --pending`", path)
    return len(tasks) - max(0, len(new) - room)


def _line(pending: Pending) -> dict[str, Any]:
    return {"task": pending.task.workload, "weight": pending.weight, "origin": pending.origin}


def remove_pending(folder: Folder, done: Iterable[Task]) -> None:
    """Remove the tasks in ``done`` from the list."""
    finished = set(done)
    with locked(folder.path):
        left = [p for p in read_pending(folder) if p.task not in finished]
        lines = [json.dumps(_line(p), separators=(",", ":")) + "\n" for p in left]
        replace_file(folder.path / NAME, "".join(lines).encode())
