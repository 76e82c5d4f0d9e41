"""Run functions that ``tvmbridge.export`` wrote, without PyTorch and without a compiler.

>>> import tvmbridge_runtime
>>> function = tvmbridge_runtime.load("model.tvmb", threads=2)  # doctest: +SKIP
>>> function(x)  # doctest: +SKIP
"""

from __future__ import annotations

from pathlib import Path

from tvmbridge_runtime.container import read_manifest
from tvmbridge_runtime.errors import ArgumentError, FileError, MachineError, RuntimeFileError
from tvmbridge_runtime.function import Function, load

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "FileError",
    "Function",
    "MachineError",
    "RuntimeFileError",
    "include_dir",
    "load",
    "read_manifest",
]


def include_dir() -> str:
    """Return the folder of ``tvmbridge_runtime.h``, for a C++ compiler."""
    return str(Path(__file__).parent / "include")
