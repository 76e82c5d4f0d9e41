"""Files of JSON lines that several processes append to, and that may be damaged.

A line is appended whole, under a lock. A process that is killed while it writes leaves at most one
unfinished line at the end; the next writer begins a new line after it, and readers skip it.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # not on Windows: there two writers at once may lose lines
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

_LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder``; the system lifts it when the process ends in any way."""
    if fcntl is None:
        yield
        return
    with (folder / _LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read_lines(path: Path) -> list[Any]:
    """The value of each line in order; None for a damaged one, of which a warning is logged.

    A missing file has no lines. Empty lines are kept as None, since others are found by number.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    values: list[Any] = []
    for number, line in enumerate(raw.removesuffix(b"\n").split(b"\n") if raw else [], 1):
        try:
            values.append(json.loads(line))
        except ValueError:
            values.append(None)
            if line.strip():
                logger.warning("%s, line %d is damaged and was skipped", path, number)
    return values


def append_lines(path: Path, values: Iterable[Any]) -> None:
    """Append a line for each value; the caller holds the folder's lock.

    Raises:
        OSError: the file cannot be written.
    """
    text = "".join(json.dumps(value, separators=(",", ":")) + "\n" for value in values)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                text = "\n" + text
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, text: str) -> None:
    """Write a whole file so that a reader sees the old one or the new one, never a part.

    Raises:
        OSError: the file cannot be written.
    """
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
