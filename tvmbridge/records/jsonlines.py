"""Files of JSON lines that several processes append to, and that may be damaged.

A line is appended whole, under a lock. A process that is killed while it writes leaves at most one
unfinished line at the end. The next writer begins a new line after it, and readers skip it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # On Windows there is no lock: two writers at once may lose lines.
    fcntl = None  # type: ignore[assignment]

from tvmbridge.core import own_files
from tvmbridge.core.plain_json import MOST_VALUES, count_values, parse_json

logger = logging.getLogger(__name__)

MOST_BYTES = 256 * 2**20
MOST_LINE_BYTES = 16 * 2**20
# JSON values of all lines of a file together; one record has about two hundred.
MOST_FILE_VALUES = 2**21
# Records shipped with tvmbridge are trusted: whoever can write them can also write the code.
SHIPPED = Path(__file__).resolve().parents[1] / "tuning_logs"

_LOCK = ".lock"


def read_own(path: Path) -> bytes:
    """Return the content of a file of records that only this user or root can have written.

    Raises:
        UntrustedFileError: others can write the file, it is no regular file, or it is larger than
            :data:`MOST_BYTES`.
        OSError: the file cannot be read.
    """
    return own_files.read_own(path, MOST_BYTES, SHIPPED)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder``; the system releases it if the process ends in any way."""
    if fcntl is None:
        yield
        return
    with (folder / _LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read_lines(path: Path) -> list[Any]:
    """Return the value of each line in order; a missing file has no lines.

    A damaged line gives None, and a warning is logged. An empty line also gives None, because other
    files refer to lines by number.
    """
    try:
        raw = read_own(path)
    except FileNotFoundError:
        return []
    values: list[Any] = []
    start, size = 0, len(raw) - raw.endswith(b"\n")
    budget = MOST_FILE_VALUES
    while raw and start <= size:
        # Splitting all lines at once would take the memory of the file a second time.
        found = raw.find(b"\n", start, size)
        end = size if found < 0 else found
        budget -= min(count_values(raw, start, end), MOST_VALUES)
        if budget < 0:
            logger.warning(
                "%s has more than %d values; line %d and what follows is not read; prune it",
                path,
                MOST_FILE_VALUES,
                len(values) + 1,
            )
            break
        values.append(_value_of(path, len(values) + 1, raw, start, end))
        start = end + 1
    return values


def _value_of(path: Path, number: int, raw: bytes, start: int, end: int) -> Any:
    """Parse the line from ``start`` to ``end`` of a file; return None if it is empty or damaged."""
    if start == end:
        return None
    try:
        if end - start > MOST_LINE_BYTES:
            raise ValueError(f"it is longer than {MOST_LINE_BYTES} bytes")
        return parse_json(raw[start:end])
    except ValueError as error:
        if raw[start:end].strip():
            logger.warning("%s, line %d is damaged and was skipped: %s", path, number, error)
        return None


def append_lines(path: Path, values: Iterable[Any]) -> None:
    """Append a line for each value; the caller holds the folder's lock."""
    text = "".join(json.dumps(value, separators=(",", ":")) + "\n" for value in values)
    # A symbolic link that somebody planted could lead to any file of this user.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
    with open(os.open(path, flags, own_files.MODE), "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                text = "\n" + text
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
