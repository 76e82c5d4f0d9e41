"""Read the file of an exported function, and verify the checksums of its bytes.

A file has a header of 64 bytes, a manifest in JSON, and a body. The header has these parts:

- the magic bytes (8);
- the length of the manifest (8 bytes, little endian);
- the CRC-32 of the manifest (4 bytes);
- the CRC-32 of the 20 bytes before (4 bytes);
- zeros.

The manifest ends, padded with spaces, at a multiple of 4096 bytes. It names the sections of the
body, and has a CRC-32 of each chunk of the body.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import stat
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tvmbridge_runtime.errors import FileError

MAGIC = b"TVMBRG\x01\n"
FORMAT = 1
_HEADER, _ALIGNMENT = 64, 4096
# Of Linux; and the bytes from which a file's pages are mapped ahead.
_MADV_POPULATE_READ, _LARGE = 22, 16 << 20


@dataclass(frozen=True)
class Container:
    """An open file.

    - ``path``: the path of the file.
    - ``manifest``: the content of its manifest.
    - ``body``: the bytes after the manifest, mapped into memory.
    """

    path: Path
    manifest: dict[str, Any]
    body: memoryview

    def section(self, name: str) -> memoryview:
        """Return the bytes of the section ``name``."""
        place = self.manifest["sections"][name]
        if min(place["offset"], place["size"]) < 0 or (
            place["offset"] + place["size"] > len(self.body)
        ):
            raise FileError(f"{self.path} has a section {name!r} that reaches beyond its end")
        return self.body[place["offset"] : place["offset"] + place["size"]]

    def chunks_of_code(self) -> range:
        """Return the numbers of the chunks, by their checksums, that the code is in."""
        sections, size = self.manifest["sections"], int(self.manifest["body"]["chunk"])
        ends = [
            sections[name]["offset"] + len(self.section(name))
            for name in ("code", "cubin")
            if name in sections
        ]
        return range(sections["code"]["offset"] // size, -(-max(ends) // size))


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; opening a FIFO would wait for a writer.

    Raises:
        FileError: the path is a FIFO, a folder or a device; or reading fails.
        OSError: the file cannot be opened.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise FileError(f"{path} is no regular file: give the path of an exported function")
    with path.open("rb") as file:
        try:
            yield file
        except OSError as error:
            raise FileError(f"{path} cannot be read: {error}") from error


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the manifest of an exported file; the body is not checked.

    Raises:
        FileError: the header or the manifest is damaged, or the file is no exported function.
        OSError: the file cannot be read.
    """
    with opened(Path(path)) as file:
        return _manifest_of(Path(path), file.read(_HEADER), file)[0]


def open_container(path: str | os.PathLike[str]) -> Container:
    """Map a file into memory, and verify the checksums of its manifest and of its code.

    Raises:
        FileError: such a byte differs from the written file, the file has another length, or it
            is no exported function.
        OSError: the file cannot be read.
    """
    path = Path(path)
    with opened(path) as file:
        manifest, start = _manifest_of(path, file.read(_HEADER), file)
        size, found = int(manifest["body"]["size"]), os.fstat(file.fileno()).st_size
        if found != start + size:
            raise FileError(
                f"{path} has {found} bytes and should have {start + size}: it is truncated or "
                "something was appended; copy or export it again"
            )
        body = mapped(file)[start:]
    container = Container(path, manifest, body)
    check_chunks(path, body, manifest["body"], numbers=container.chunks_of_code())
    return container


def mapped(file: BinaryIO) -> memoryview:
    """Map a file into memory, and begin to read it in another thread."""
    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if sys.platform == "linux" and len(mapping) > _LARGE:
        threading.Thread(target=_populate, args=(mapping,), daemon=True).start()
    return memoryview(mapping)


def _populate(mapping: mmap.mmap) -> None:
    """Map all pages of a file, while the caller imports modules; older systems refuse it."""
    first = ctypes.byref(ctypes.c_char.from_buffer(mapping))
    ctypes.CDLL(None).madvise(first, ctypes.c_size_t(len(mapping)), _MADV_POPULATE_READ)


def _manifest_of(path: Path, header: bytes, file: Any) -> tuple[dict[str, Any], int]:
    if header[: len(MAGIC)] != MAGIC:
        if header[:6] == MAGIC[:6]:
            raise FileError(f"{path} has another format version than {FORMAT}, or is damaged")
        raise FileError(f"{path} is no function that tvmbridge exported, or is damaged")
    if len(header) < _HEADER:
        raise FileError(f"{path} is truncated: it ends within its header")
    crc = int.from_bytes(header[20:24], "little")
    if zlib.crc32(header[:20]) != crc or any(header[24:]):
        raise FileError(f"{path} is damaged: its header fails its checksum; copy it again")
    length = int.from_bytes(header[8:16], "little")
    room = os.fstat(file.fileno()).st_size - _HEADER
    text = file.read(min(length, room))
    if len(text) < length:
        raise FileError(f"{path} is truncated: it ends within its manifest")
    if zlib.crc32(text) != int.from_bytes(header[16:20], "little"):
        raise FileError(f"{path} is damaged: its manifest fails its checksum; copy it again")
    try:
        manifest: dict[str, Any] = json.loads(text)
        form = manifest.get("format")
    except (ValueError, AttributeError, RecursionError) as error:
        raise FileError(f"{path} has a manifest that cannot be read: {error}") from error
    if form != FORMAT:
        raise FileError(
            f"{path} has format {form}, and this runtime reads format {FORMAT}: export the "
            "function again, or install the tvmbridge_runtime of the tvmbridge that exported it"
        )
    return manifest, _HEADER + length


def check_chunks(
    path: Path,
    body: memoryview,
    described: dict[str, Any],
    *,
    checksum: Callable[[memoryview], int] = zlib.crc32,
    numbers: range | None = None,
) -> None:
    """Compare the CRC-32 of chunks of ``body`` with the checksums in ``described``.

    Args:
        checksum: the function that computes a CRC-32.
        numbers: the chunks to compare; None: all.

    Raises:
        FileError: a checksum differs.
    """
    size, expected = int(described["chunk"]), described["crc32"]
    starts = range(0, len(body), size)

    numbers = range(len(starts)) if numbers is None else numbers
    workers = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2, 8)
    workers = 1 if len(numbers) <= 2 else workers
    equal = list[bool]()

    def compare(part: Sequence[int]) -> None:
        equal.append(all(checksum(body[starts[n] : starts[n] + size]) == expected[n] for n in part))

    if len(starts) == len(expected):
        parts = [numbers[i::workers] for i in range(workers)]
        others = [threading.Thread(target=compare, args=(part,)) for part in parts[1:]]
        for thread in others:
            thread.start()
        compare(parts[0])
        for thread in others:
            thread.join()
    if not all(equal) or len(equal) < workers:
        raise FileError(f"{path} is damaged: its content fails its checksum; copy it again")
