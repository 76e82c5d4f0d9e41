"""The machine: its processor's name, and the user's folder for what is found out on it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

FOLDER = "TVMBRIDGE_CACHE_DIR"
SWITCH = "TVMBRIDGE_CACHE"

_threads: int | None = None


def cpu_model() -> str:
    """The processor's name, as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cache_folder() -> Path:
    """The folder that the variable names, or that of the user's caches."""
    named = os.environ.get(FOLDER)
    if named:
        return Path(named).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(caches) if os.path.isabs(caches) else Path.home() / ".cache"
    return base / "tvmbridge"


def caching_is_off() -> bool:
    """Whether the variable says that nothing is read from the user's folder, or kept there."""
    return os.environ.get(SWITCH, "1") in ("0", "off", "false", "no")


def threads() -> int:
    """The number of threads that code is compiled for: PyTorch's."""
    return torch.get_num_threads() if _threads is None else _threads


def compile_for_threads(number: int) -> None:
    """Compile for so many from now on, however many PyTorch has: the code will run elsewhere."""
    global _threads
    _threads = number
