"""The files of the cache: one for each key, checked when it is read, written whole or not at all.

A file begins with a line that names the format, and the digest of all that follows. Then come the
length of a description, the description in JSON, and a shared library or bitcode. The library is
code, so a file is read only if nobody but this user can have written it. The description is plain
JSON and never pickled, so that a damaged one cannot create objects of any class.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tvmbridge.cache.key import CacheKey
from tvmbridge.core.errors import BridgeError
from tvmbridge.core.machine import cache_folder
from tvmbridge.core.own_files import UntrustedFileError, distrust, read_own, replace_file
from tvmbridge.core.plain_json import parse_json
from tvmbridge.core.set_within import set_within

logger = logging.getLogger(__name__)

SIZE = "TVMBRIDGE_CACHE_SIZE"
DEFAULT_BYTES = 2 * 2**30
MOST_BYTES = 2**30
SUFFIX = ".tvmbridge"
_MAGIC = b"tvmbridge compiled code 1\n"
_DIGEST = 64
_LENGTH = 8
_HEADER = len(_MAGIC) + _DIGEST + _LENGTH
# On a miss, the keys of this many files are compared to name the entries that differ.
_COMPARED = 32
_MOST_KEY_BYTES = 64 * 1024
_MOST_VALUES = 2**21
_STALE_SECONDS = 3600


class DamagedFileError(BridgeError, ValueError):
    """A file of the cache is damaged, of another format, or of another key."""


@dataclass(frozen=True)
class Kept:
    """The content of a cache file: a description in plain JSON, and a shared library or bitcode."""

    description: Mapping[str, Any]
    library: bytes


def most_bytes() -> int:
    """Return how many bytes the cache may have, by ``TVMBRIDGE_CACHE_SIZE`` or else the default.

    A value that is no number is logged as a warning and ignored.
    """
    named = os.environ.get(SIZE, "")
    if named and not named.isdecimal():
        logger.warning("%s is %r, which is no number of bytes; it is not used", SIZE, named)
    return int(named) if named.isdecimal() else DEFAULT_BYTES


class Store:
    """The folder of a cache; several processes may use it at once.

    Args:
        most: the largest total size in bytes; beyond it, the least recently used files are removed.
    """

    def __init__(self, folder: Path, most: int = DEFAULT_BYTES) -> None:
        self.folder = folder
        self.most = most

    @staticmethod
    def of_now() -> Store:
        """Return the store that the environment's variables name."""
        return Store(cache_folder(), most_bytes())

    def path(self, key: CacheKey) -> Path:
        """Return the path of the file for ``key``; the file need not exist."""
        return self.folder / f"{key.digest}{SUFFIX}"

    def read(self, key: CacheKey) -> Kept | str:
        """Return the content of the file for ``key``, or a text that says why there is none.

        For a file that is damaged, or that somebody else may have written, a warning is logged.
        """
        path = self.path(key)
        try:
            self._refuse_shared()
            found, kept = parse_file(read_own(path, MOST_BYTES))
            if found != key:
                raise DamagedFileError("it is of another key")
        except FileNotFoundError:
            return self._nearest(key)
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("compiled code in %s is not used: %s", path, error)
            return f"the file cannot be used: {error}"
        with contextlib.suppress(OSError):  # the folder may be read-only
            os.utime(path)
        return kept

    def write(self, key: CacheKey, kept: Kept) -> str | None:
        """Store code for ``key``; return None, or why it cannot be stored. Never raise."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._refuse_shared()
            content = formatted(key, kept)
            if len(content) > min(self.most, MOST_BYTES):
                return "it is larger than the cache"
            replace_file(self.path(key), content)
            self.shrink()
        except (OSError, RuntimeError, ValueError) as error:
            logger.warning("compiled code cannot be kept in %s: %s", self.folder, error)
            return f"it cannot be kept: {error}"
        return None

    def files(self) -> list[tuple[Path, os.stat_result]]:
        """Return the cache files with their ``stat`` results, the most recently used first."""
        found = []
        if self.folder.is_dir():
            for path in self.folder.glob(f"*{SUFFIX}"):
                with contextlib.suppress(FileNotFoundError):  # another process has removed it
                    found.append((path, path.lstat()))
        return sorted(found, key=lambda f: f[1].st_mtime_ns, reverse=True)

    def keys(self) -> Iterator[tuple[Path, Mapping[str, str]]]:
        """Yield the files whose keys can be read, with the keys, the most recently used first."""
        for path, _ in self.files():
            try:
                yield path, _entries_of(path)
            except (OSError, ValueError, RecursionError):
                continue

    def size(self) -> int:
        """Return the total size of all cache files, in bytes."""
        return sum(status.st_size for _, status in self.files())

    def clear(self) -> int:
        """Remove all cache files, and return how many there were."""
        files = self.files()
        for path, _ in files:
            path.unlink(missing_ok=True)
        return len(files)

    def shrink(self) -> None:
        """Remove the least recently used files until the total size is within the limit.

        Also remove the unfinished files of processes that were killed while they wrote.
        """
        total = 0
        for path, status in self.files():
            total += status.st_size
            if total > self.most:
                path.unlink(missing_ok=True)
        for path in self.folder.glob(f".*{SUFFIX}.*"):
            with contextlib.suppress(FileNotFoundError):
                if path.lstat().st_mtime < time.time() - _STALE_SECONDS:
                    path.unlink()

    def _refuse_shared(self) -> None:
        reason = distrust(self.folder.stat())
        if reason is not None:
            raise UntrustedFileError(f"{self.folder} {reason}")

    def _nearest(self, key: CacheKey) -> str:
        """Name the entries in which ``key`` differs from the most similar key of the same graph."""
        best: tuple[str, ...] | None = None
        with contextlib.suppress(OSError):
            for number, (_, entries) in enumerate(self.keys()):
                differing = key.differing(entries)
                if "graph" not in differing and (best is None or len(differing) < len(best)):
                    best = differing
                if number + 1 >= _COMPARED:
                    break
        return "nothing is kept for this graph" if best is None else f"other {', '.join(best)}"


def formatted(key: CacheKey, kept: Kept) -> bytes:
    """Return the content of the file for ``key``, which :func:`parse_file` reads."""
    described = {"key": dict(key.entries), "description": dict(kept.description)}
    text = json.dumps(described).encode()
    rest = len(text).to_bytes(_LENGTH, "big") + text + kept.library
    return _MAGIC + hashlib.sha256(rest).hexdigest().encode() + rest


def parse_file(content: bytes) -> tuple[CacheKey, Kept]:
    """Parse the content of a cache file, and return its key and what is stored for the key.

    Raises:
        ValueError: the content is damaged, or was written in another format.
    """
    if not content.startswith(_MAGIC):
        raise DamagedFileError("it is no compiled code of this version's")
    rest = content[len(_MAGIC) + _DIGEST :]
    if hashlib.sha256(rest).hexdigest().encode() != content[len(_MAGIC) :][:_DIGEST]:
        raise DamagedFileError("it is damaged: its checksum is another")
    end = _LENGTH + int.from_bytes(rest[:_LENGTH], "big")
    described = parse_json(rest[_LENGTH:end], _MOST_VALUES)
    if not isinstance(described, dict):
        raise DamagedFileError("it has no description")
    description = described.get("description")
    if not isinstance(description, dict):
        raise DamagedFileError("it has no description")
    return CacheKey(_entries(described.get("key"))), Kept(description, rest[end:])


def _entries_of(path: Path) -> dict[str, str]:
    """Read the key at the beginning of a cache file, for display; the checksum is not compared."""
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        head = file.read(_HEADER + _MOST_KEY_BYTES) or b""
    if not head.startswith(_MAGIC):
        raise DamagedFileError("it is no compiled code of this version's")
    text = head[_HEADER:].decode(errors="replace").removeprefix('{"key": ')
    found, _ = json.JSONDecoder().raw_decode(text)
    return _entries(found)


def _entries(found: Any) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise DamagedFileError("it has no key")
    return found


class CodeSource(Protocol):
    """Another process that compiles the same code, or that waits for the code of this one."""

    def received(self, digest: str) -> Kept | None:
        """Return the code whose key has this digest; None: compile it here."""

    def give(self, key: CacheKey, kept: Kept) -> None:
        """Offer code to the other processes."""


_now: ContextVar[CodeSource | None] = ContextVar("source", default=None)


def source_now() -> CodeSource | None:
    """Return the source of the compilation that is running; None: it has none."""
    return _now.get()


def received_from(source: CodeSource) -> AbstractContextManager[object]:
    """Let compilations within this context get code from ``source``."""
    return set_within(_now, source)
