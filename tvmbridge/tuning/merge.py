"""Merge and prune folders of records: keep the best record of each task."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tvm.target import Target

from tvmbridge.core.errors import BridgeError
from tvmbridge.core.own_files import replace_file
from tvmbridge.records.folder import (
    FAILED_SECONDS,
    RECORDS,
    VERDICTS,
    WORKLOADS,
    Folder,
    Record,
    TaskRecords,
    Verdict,
)
from tvmbridge.records.jsonlines import locked
from tvmbridge.records.meta import NAME as META
from tvmbridge.records.meta import Meta, read_meta, target_name, write_meta
from tvmbridge.records.tasks import Task


def merge(sources: Sequence[Path], out: Path | None = None) -> Path:
    """Merge the records of several folders; keep the best record of each tuned task.

    Args:
        out: the folder to write; None: the first of ``sources``.

    Returns:
        The written folder.

    Raises:
        BridgeError: a folder has no records, or the folders differ in target or TVM version.
    """
    folders = [target_folder(path) for path in sources]
    metas = [_meta(folder) for folder in folders]
    for folder, meta in zip(folders[1:], metas[1:], strict=True):
        for what in ("target", "tvm"):
            mine, theirs = getattr(metas[0], what), getattr(meta, what)
            if mine != theirs:
                raise BridgeError(
                    f"{folders[0]} and {folder} cannot be merged: the {what} of the one is "
                    f"{json.dumps(mine)}, that of the other {json.dumps(theirs)}"
                )
    target = Target(metas[0].target)
    destination = folders[0] if out is None else out
    if out is not None and not (out / META).exists():
        destination = out if out.name == target_name(target) else out / target_name(target)
    if destination not in folders and (destination / META).exists():
        return merge([destination, *folders])
    entries: dict[Task, TaskRecords] = {}
    for folder in folders:
        for task, entry in Folder(folder, target).load().items():
            entries[task] = _joined(entries[task], entry) if task in entries else entry
    _write(destination, metas[0], entries.values())
    return destination


def prune(path: Path) -> list[Path]:
    """Remove all records but the best one of each task whose tuning has finished.

    Args:
        path: the folder of one target, or a log directory, whose folders are all pruned.

    Returns:
        The written folders.
    """
    below = sorted(p.parent for p in path.glob(f"*/{META}"))
    return [merge([folder]) for folder in below or [path]]


def target_folder(path: Path) -> Path:
    """Return the folder of one target: ``path`` itself, or the only such folder in it.

    Raises:
        BridgeError: there is no such folder, or more than one.
    """
    if (path / META).is_file():
        return path
    found = sorted(p.parent for p in path.glob(f"*/{META}")) if path.is_dir() else []
    if len(found) == 1:
        return found[0]
    names = ", ".join(p.name for p in found) or "none"
    raise BridgeError(
        f"{path} must be the folder of one target's records; folders with a {META} in it: {names}"
    )


def _meta(folder: Path) -> Meta:
    meta = read_meta(folder)
    if isinstance(meta, str):
        raise BridgeError(f"the records in {folder} cannot be merged: {meta}")
    return meta


def _joined(first: TaskRecords, second: TaskRecords) -> TaskRecords:
    verdicts = [e.verdict for e in (first, second) if e.verdict is not None]
    verdict = min(verdicts, key=_gain, default=None)
    if verdict is not None:
        verdict = replace(verdict, trials=max(v.trials for v in verdicts))
    records = list({r.digest: r for r in (*first.records, *second.records)}.values())
    return TaskRecords(first.task, first.names | second.names, records, verdict)


def _gain(verdict: Verdict) -> float:
    """Return the record's time divided by the rule's; absolute times differ between machines."""
    if not verdict.applies or verdict.seconds is None or not verdict.rule_seconds:
        return 1.0
    return verdict.seconds / verdict.rule_seconds


def _kept(entry: TaskRecords) -> list[Record]:
    """Return the record to apply, or all records that ran if the task's tuning is not finished."""
    if entry.verdict is None:
        return [r for r in entry.records if r.seconds < FAILED_SECONDS]
    return [] if entry.chosen is None else [entry.chosen]


def _write(folder: Path, meta: Meta, entries: Iterable[TaskRecords]) -> None:
    """Replace the files of a folder, one after the other.

    A reader between two replacements may miss records, but never applies a record of another task:
    a verdict names its record by a digest.
    """
    workloads, records, verdicts = [], [], []
    for index, entry in enumerate(entries):
        workloads.append(entry.task.workload)
        records += [[index, list(record.content)] for record in _kept(entry)]
        if entry.verdict is not None:
            verdicts.append(asdict(replace(entry.verdict, task=entry.task.key)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            for name, values in (
                (VERDICTS, verdicts),
                (WORKLOADS, workloads),
                (RECORDS, records),
            ):
                lines = (json.dumps(value, separators=(",", ":")) + "\n" for value in values)
                replace_file(folder / name, "".join(lines).encode())
            if not (folder / META).exists():
                write_meta(folder, meta)
    except OSError as error:
        raise BridgeError(f"{folder} cannot be written: {error}") from error
