"""The file format of bundles: parts of a cache one after the other, then a digest of them all.

A part is the length of a header, the header in JSON (kind, name, size, digest), and the content.
Names are checked by patterns that exclude paths, and nothing is unpickled. A reader compares the
digest of the whole file before it parses any part.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from tvmbridge.core.errors import BridgeError
from tvmbridge.core.own_files import UntrustedFileError, distrust, replacing
from tvmbridge.core.plain_json import parse_json

_MAGIC: Final = b"tvmbridge bundle 1\n"
_LENGTH: Final = 8
_DIGEST: Final = 64
_CHUNK: Final = 2**20
_MOST_HEADER: Final = 4096
_MOST_PARTS: Final = 2**16
_FIELDS: Final = {"kind", "name", "size", "sha256"}
MOST_PART: Final = 2**30 + 2**20
# The valid names by kind of part: code, choices of kernels, tvmbridge's compiled C++ extensions,
# tuning records, and the description of the module.
_NAMES: Final = {
    "code": re.compile(r"[0-9a-f]{64}"),
    "choices": re.compile(r"choices-[0-9a-f]{24}\.json"),
    "halves": re.compile(r"_[a-z]{1,40}-[0-9a-f]{24}\.[A-Za-z0-9_.-]{1,80}"),
    "records": re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,200}:[a-z_]{1,40}\.json"),
    "module": re.compile(r"module"),
}


class BundleError(BridgeError, ValueError):
    """A file is no bundle, is damaged, or may have been written by somebody else."""


@dataclass(frozen=True)
class Part:
    """One part of a bundle: its kind (a key of ``_NAMES``), its name and its content."""

    kind: str
    name: str
    content: bytes


def write_bundle(path: Path, parts: Iterable[Part]) -> int:
    """Write a bundle, whole or not at all, and return its size in bytes."""
    with replacing(path) as file:
        return _write(file, parts)


def _write(file: BinaryIO, parts: Iterable[Part]) -> int:
    digest, size = hashlib.sha256(), 0

    def put(content: bytes) -> None:
        nonlocal size
        file.write(content)
        digest.update(content)
        size += len(content)

    put(_MAGIC)
    for part in parts:
        header = {
            "kind": part.kind,
            "name": part.name,
            "size": len(part.content),
            "sha256": hashlib.sha256(part.content).hexdigest(),
        }
        text = json.dumps(header).encode()
        put(len(text).to_bytes(_LENGTH, "big"))
        put(text)
        put(part.content)
    put(bytes(_LENGTH))
    file.write(digest.hexdigest().encode())
    return size + _DIGEST


def read_bundle(path: Path) -> Iterator[Part]:
    """Yield the parts of a bundle, after comparing the digest of the whole file.

    Raises:
        BundleError: the file is damaged.
        UntrustedFileError: somebody else may have written the file.
        OSError: the file cannot be read.
    """
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        regular = stat.S_ISREG(status.st_mode)
        reason = distrust(status) if regular else "is no regular file"
        if reason is not None:
            raise UntrustedFileError(f"{path} {reason}")
        _check_digest(file, status.st_size, path)
        file.seek(len(_MAGIC))
        end = status.st_size - _DIGEST
        for _ in range(_MOST_PARTS):
            part = _next_part(file, end, path)
            if part is None:
                return
            yield part
        raise BundleError(f"{path} has more than {_MOST_PARTS} parts")


def _check_digest(file: BinaryIO, size: int, path: Path) -> None:
    if file.read(len(_MAGIC)) != _MAGIC:
        raise BundleError(f"{path} is no bundle of this version")
    digest, left = hashlib.sha256(_MAGIC), size - len(_MAGIC) - _DIGEST
    while left > 0 and (chunk := file.read(min(left, _CHUNK))):
        digest.update(chunk)
        left -= len(chunk)
    if left or file.read(_DIGEST) != digest.hexdigest().encode():
        raise BundleError(f"{path} is damaged: its checksum is another; copy or make it again")


def _next_part(file: BinaryIO, end: int, path: Path) -> Part | None:
    """Read the part at the current position of ``file``, before ``end``; None after the last."""
    damaged = BundleError(f"{path} is damaged: a part of it has no valid header")
    length = int.from_bytes(file.read(_LENGTH), "big")
    if length == 0:
        if file.tell() != end:
            raise damaged
        return None
    if length > min(_MOST_HEADER, end - file.tell()):
        raise damaged
    try:
        header = parse_json(file.read(length))
        kind, name, size = header["kind"], header["name"], header["size"]
        valid = _NAMES[kind].fullmatch(name) and type(size) is int and set(header) == _FIELDS
    except (ValueError, KeyError, TypeError):
        raise damaged from None
    if not valid or not 0 <= size <= min(MOST_PART, end - file.tell()):
        raise damaged
    content = file.read(size)
    if hashlib.sha256(content).hexdigest() != header["sha256"]:
        raise BundleError(f"{path} is damaged: the checksum of {name} is another")
    return Part(kind, name, content)
