"""Where compilation looks for records, and which record a function gets."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir import Schedule, Trace
from tvm.target import Target

from tvmbridge.core.errors import first_line
from tvmbridge.records.folder import RECORDS, VERDICTS, WORKLOADS, Entry, Folder
from tvmbridge.records.meta import NAME as META
from tvmbridge.records.tasks import Task
from tvmbridge.schedules import marked_scheduled

logger = logging.getLogger(__name__)

VARIABLE = "TVMBRIDGE_TUNING_LOGS"
DEFAULT_LOG_DIR = "tuning_logs"


def named_log_dir(option: str | None) -> Path | None:
    """The log directory that the user asked for: by the option, else by the variable."""
    named = option or os.environ.get(VARIABLE)
    return Path(named) if named else None


def log_dirs(option: str | None) -> list[Path]:
    """Where to look for records, in this order: the directory that the user named, ``tuning_logs``
    of the working directory, and the one that came with tvmbridge."""
    package = Path(__file__).resolve().parents[1]
    shipped = (package / DEFAULT_LOG_DIR, package.parent / DEFAULT_LOG_DIR)
    named = named_log_dir(option)
    found = [*([named] if named else []), Path(DEFAULT_LOG_DIR), *shipped]
    return list(dict.fromkeys(filter(None, map(_resolved, found))))


def _resolved(path: Path) -> Path | None:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # the working directory was deleted; links in a circle
        logger.warning("the tuning records in %s are not used: %s", path, error)
        return None


def apply_trace(mod: tvm.IRModule, trace: Any) -> tirx.PrimFunc:
    """The function ``main`` of ``mod`` scheduled by the JSON of a trace.

    Raises:
        Exception: the steps do not fit the function; TVM has no narrower class.
    """
    schedule = Schedule(mod)
    Trace.apply_json_to_schedule(trace, schedule)
    return schedule.mod["main"]


@dataclass(frozen=True)
class Library:
    """The loaded folders of one target, the most important first."""

    entries: Sequence[Mapping[Task, Entry]]

    @staticmethod
    def open(option: str | None, target: Target) -> Library:
        """Load what there is for ``target``; what may not be applied is logged and left out."""
        folders = (Folder.below(path, target) for path in log_dirs(option))
        loaded = (_load_once(folder) for folder in folders if _readable(folder))
        return Library([entries for entries in loaded if entries])

    def knows(self, task: Task) -> bool:
        """Whether a task was tuned, with whatever result."""
        return any(e[task].verdict is not None for e in self.entries if task in e)

    def schedule(self, task: Task) -> tirx.PrimFunc | None:
        """The function by the best record for ``task``, None if there is no record to apply."""
        for entries in self.entries:
            entry = entries.get(task)
            record = entry.chosen if entry is not None else None
            if entry is None or record is None:
                continue
            try:
                return marked_scheduled(apply_trace(entry.task.mod, record.trace))
            except Exception as error:
                logger.warning(
                    "the record of %s cannot be applied and is left out: %s",
                    task.label,
                    first_line(error),
                )
        return None


EMPTY = Library([])


def _readable(folder: Folder) -> bool:
    """Whether there are records; a folder that may not be looked into has none."""
    try:
        return folder.exists
    except OSError as error:
        logger.warning("the tuning records in %s are not used: %s", folder.path, error)
        return False


def _load_once(folder: Folder) -> Mapping[Task, Entry]:
    stamps = tuple(_stamp(folder.path / n) for n in (META, WORKLOADS, RECORDS, VERDICTS))
    # A target by its text: two objects of one target are not equal to each other.
    return _load(str(folder.path.resolve()), str(folder.target), stamps)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=32)
def _load(path: str, target: str, stamps: tuple[tuple[int, int], ...]) -> Mapping[Task, Entry]:
    folder = Folder(Path(path), Target(target))
    reason = folder.refusal()
    if reason is None:
        try:
            return folder.load()
        except OSError as error:
            reason = f"it cannot be read: {error}"
    logger.warning("the tuning records in %s are not used: %s", path, reason)
    return {}
