"""The machine: its processor's name, the user's cache folder, and the number of threads."""

from __future__ import annotations

import os
import platform
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
    """Return tvmbridge's cache folder: ``TVMBRIDGE_CACHE_DIR``, or one in the user's caches."""
    named = os.environ.get(FOLDER)
    if named:
        return Path(named).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(caches) if os.path.isabs(caches) else Path.home() / ".cache"
    return base / "tvmbridge"


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
