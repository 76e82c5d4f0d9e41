"""Find the tuning records that compilation uses, and choose the record for each function."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tvm import tirx
from tvm.target import Target

from tvmbridge.core.errors import first_line
from tvmbridge.records.allowed import scheduled_by
from tvmbridge.records.folder import RECORDS, VERDICTS, WORKLOADS, Folder, TaskRecords
from tvmbridge.records.jsonlines import SHIPPED
from tvmbridge.records.meta import NAME as META
from tvmbridge.records.tasks import Task
from tvmbridge.schedules import marked_scheduled

logger = logging.getLogger(__name__)

VARIABLE = "TVMBRIDGE_TUNING_LOGS"


def named_log_dir(option: str | None) -> Path | None:
    """Return the log directory named by the option, or else by ``TVMBRIDGE_TUNING_LOGS``.

    None if neither names one, or if the directory does not exist. A missing directory is logged
    once and never created, because its name may be mistyped.
    """
    named = option or os.environ.get(VARIABLE)
    if not named:
        return None
    path = Path(named)
    if _is_missing(path):
        _warn_of_missing(str(path), "the option tuning_logs" if option else VARIABLE)
        return None
    return path


def _is_missing(path: Path) -> bool:
    try:
        return not path.exists()
    except OSError:  # Reading the directory later logs the reason.
        return False


@functools.lru_cache(maxsize=256)
def _warn_of_missing(path: str, whose: str) -> None:
    logger.warning(
        "there is no directory %s, which %s names: no tuning record is read from it, and no kernel "
        "is noted in it; correct the name, or make the directory",
        path,
        whose,
    )


def log_dirs(option: str | None) -> list[Path]:
    """Return the directories to search for records: the user's own, then the one of tvmbridge.

    The working directory is not searched unless the user names it.
    """
    named = named_log_dir(option)
    found = [SHIPPED] if named is None else [named, SHIPPED]
    return list(dict.fromkeys(filter(None, map(_resolved, found))))


def _resolved(path: Path) -> Path | None:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # a deleted working directory; cyclic links
        logger.warning("the tuning records in %s are not used: %s", path, error)
        return None


@dataclass(frozen=True)
class Library:
    """The tuning records of one target.

    - ``entries``: the tasks of each loaded folder with their records; earlier folders win.
    """

    entries: Sequence[Mapping[Task, TaskRecords]]

    @staticmethod
    def open(option: str | None, target: Target) -> Library:
        """Load the records for ``target``; folders that may not be used are logged and left out."""
        folders = (Folder.below(path, target) for path in log_dirs(option))
        loaded = (_load_once(folder) for folder in folders if _readable(folder))
        return Library([entries for entries in loaded if entries])

    def knows(self, task: Task) -> bool:
        """Whether a folder has a verdict for the task, with or without a record to apply."""
        return any(e[task].verdict is not None for e in self.entries if task in e)

    def schedule(self, task: Task) -> tirx.PrimFunc | None:
        """Return the function of ``task`` scheduled by its record; None if no record applies."""
        for entries in self.entries:
            entry = entries.get(task)
            record = entry.chosen if entry is not None else None
            if entry is None or record is None:
                continue
            try:
                return marked_scheduled(scheduled_by(entry.task.mod, record.trace).mod["main"])
            except Exception as error:
                logger.warning(
                    "the record %s of %s in %s cannot be applied and is left out: %s",
                    record.digest,
                    task.label,
                    entry.source,
                    first_line(error),
                )
        return None


EMPTY = Library([])


def _readable(folder: Folder) -> bool:
    """Whether ``folder`` has records; a folder that cannot be accessed is logged and has none."""
    try:
        return folder.exists
    except OSError as error:
        logger.warning("the tuning records in %s are not used: %s", folder.path, error)
        return False


def _load_once(folder: Folder) -> Mapping[Task, TaskRecords]:
    stamps = tuple(_stamp(folder.path / n) for n in (META, WORKLOADS, RECORDS, VERDICTS))
    # The target is passed as text, because two Target objects never compare equal.
    return _load(str(folder.path.resolve()), str(folder.target), stamps)


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size)


@functools.lru_cache(maxsize=32)
def _load(
    path: str, target: str, stamps: tuple[tuple[int, ...], ...]
) -> Mapping[Task, TaskRecords]:
    folder = Folder(Path(path), Target(target))
    reason = folder.refusal()
    if reason is None:
        try:
            return folder.load()
        except OSError as error:
            reason = f"it cannot be read: {error}"
    logger.warning("the tuning records in %s are not used: %s", path, reason)
    return {}
