"""Read and write files that only this user can have written, such as compiled code and records."""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tvmbridge.core.errors import BridgeError

MODE = 0o644  # others can read but not write, whatever the umask


class UntrustedFileError(BridgeError, OSError):
    """Raised for a file that another user may have written, or that is too large to be read."""


def read_own(path: Path, most: int, shipped: Path | None = None) -> bytes:
    """Return the content of a file that only this user, or root, can have written.

    Args:
        shipped: a folder that is part of the installed tvmbridge; its files are always trusted.

    Raises:
        UntrustedFileError: other users can write the file, it is no regular file, or it is too
            large.
        OSError: the file cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        reason = "is no regular file; remove it" if not stat.S_ISREG(status.st_mode) else None
        reason = reason or distrust(status)
        trusted = shipped is not None and path.resolve().is_relative_to(shipped.resolve())
        if reason is not None and not trusted:
            raise UntrustedFileError(f"{path} {reason}")
        # read(n) allocates n bytes at once, so ask for no more than the file has.
        content = file.read(min(most, status.st_size) + 1)
    if len(content) > most:
        raise UntrustedFileError(f"{path} is larger than {most} bytes; prune or remove it")
    return content


def distrust(status: os.stat_result) -> str | None:
    """Return why another user may have written the file or folder; None if no other user can."""
    if not hasattr(os, "getuid"):  # Windows has neither owners nor modes of this kind
        return None
    if status.st_uid not in (os.getuid(), 0):
        return f"belongs to another user ({status.st_uid}); copy it if you trust its content"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written by others; if you trust its content, run `chmod go-w` on it"
    return None


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically: a reader sees the old file or the new one, never a part."""
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path, mode: int = MODE) -> Iterator[BinaryIO]:
    """Yield a new file that takes the place of ``path`` on exit, unless there was an error."""
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
