"""Regions for ``torch.profiler``; while the profiler is off, a region costs one flag check."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler

_OFF = nullcontext()


def profiling() -> bool:
    """Whether PyTorch's profiler is recording."""
    return profiler._is_profiler_enabled


def region(name: str) -> AbstractContextManager[Any]:
    """Return a context manager that marks a profiler region ``tvmbridge::name``, if it records."""
    if not profiler._is_profiler_enabled:
        return _OFF
    return torch.profiler.record_function(f"tvmbridge::{name}")
