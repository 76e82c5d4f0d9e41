"""The machine: its processor's name, the user's cache folder, and the number of threads."""

from __future__ import annotations

import os
import platform
import re
import tempfile
from pathlib import Path

import torch

FOLDER = "TVMBRIDGE_CACHE_DIR"
SWITCH = "TVMBRIDGE_CACHE"

_threads: int | None = None


def cpu_model() -> str:
    """Return the processor's name as the operating system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cache_folder() -> Path:
    """Return tvmbridge's cache folder: ``TVMBRIDGE_CACHE_DIR``, or one in the user's caches.

    A user without a home directory, as in a container, has it in the temporary folder.
    """
    named = os.environ.get(FOLDER)
    if named:
        return below_home(named)
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(caches):
        return Path(caches) / "tvmbridge"
    home = below_home("~")
    if not home.is_absolute():
        return Path(tempfile.gettempdir()) / f"tvmbridge-{os.getuid()}"
    return home / ".cache" / "tvmbridge"


def below_home(path: str) -> Path:
    """Return ``path`` with a leading ``~`` replaced; unchanged if that home is not known."""
    return Path(os.path.expanduser(path))  # Path.expanduser raises for an unknown one.


def caching_is_off() -> bool:
    """Whether ``TVMBRIDGE_CACHE`` says that the cache folder is neither read nor written."""
    return os.environ.get(SWITCH, "1") in ("0", "off", "false", "no")


def threads() -> int:
    """Return the number of threads that code is compiled for: by default PyTorch's number."""
    return torch.get_num_threads() if _threads is None else _threads


def compile_for_threads(number: int) -> None:
    """Compile for ``number`` threads from now on, not PyTorch's: the code will run elsewhere."""
    global _threads
    _threads = number


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
