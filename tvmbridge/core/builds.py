"""Identify the build of a library or program file, on any machine, from the file's beginning."""

from __future__ import annotations

import re
from pathlib import Path

# The build-id note of an ELF file: lengths of name and content, type, name.
_BUILD_ID = re.compile(rb"\x04\0\0\0([\x08-\x40])\0\0\0\x03\0\0\0GNU\0", re.DOTALL)
_SEARCHED = 2**20


def build_stamp(path: Path) -> str:
    """Return the file's name, its size, and the build id that the linker computed from its content.

    Copies of one build have the same stamp on all machines. For a file without a build id, the
    stamp has the time of the last change instead, so copies have different stamps.

    Raises:
        OSError: the file cannot be read.
    """
    status = path.stat()
    with path.open("rb") as file:
        head = file.read(_SEARCHED)
    found = _BUILD_ID.search(head)
    if found is None:
        return f"{path.name} {status.st_size} changed {status.st_mtime_ns}"
    identifier = head[found.end() : found.end() + found.group(1)[0]]
    return f"{path.name} {status.st_size} {identifier.hex()}"
