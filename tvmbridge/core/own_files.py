"""Files that this user alone can have written: records, and compiled code, which is code."""

from __future__ import annotations

import os
import stat
import uuid
from pathlib import Path

from tvmbridge.core.errors import BridgeError

MODE = 0o644  # readable by all, and written by its owner alone whatever the umask


class UntrustedFileError(BridgeError, OSError):
    """A file that somebody else may have written, or that is out of proportion, is not read."""


def read_own(path: Path, most: int, shipped: Path | None = None) -> bytes:
    """The content of a file that only this user, or root, can have written.

    Args:
        most: the largest size in bytes that is read.
        shipped: a folder that came with tvmbridge, whose files are trusted as its code is.

    Raises:
        UntrustedFileError: others can write it, or it is no file of a fitting size.
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        reason = "is no regular file; remove it" if not stat.S_ISREG(status.st_mode) else None
        reason = reason or distrust(status)
        trusted = shipped is not None and path.resolve().is_relative_to(shipped.resolve())
        if reason is not None and not trusted:
            raise UntrustedFileError(f"{path} {reason}")
        # Python allocates what is asked for, whatever the size of the file.
        content = file.read(min(most, status.st_size) + 1)
    if len(content) > most:
        raise UntrustedFileError(f"{path} is larger than {most} bytes; prune or remove it")
    return content


def distrust(status: os.stat_result) -> str | None:
    """Why somebody else may have written the file, or into the folder; None: nobody else can."""
    if not hasattr(os, "getuid"):  # Windows has neither owners nor modes of this kind
        return None
    if status.st_uid not in (os.getuid(), 0):
        return f"belongs to another user ({status.st_uid}); copy it if you trust its content"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written by others; if you trust its content, run `chmod go-w` on it"
    return None


def replace_file(path: Path, content: bytes) -> None:
    """Write a whole file so that a reader sees the old one or the new one, never a part.

    Raises:
        OSError: the file cannot be written.
    """
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE), "wb") as file:
            file.write(content)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
