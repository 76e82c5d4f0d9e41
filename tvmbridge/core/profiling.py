"""Regions for ``torch.profiler``; where it is off they cost a look at one flag."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler

_OFF = nullcontext()


def profiling() -> bool:
    """Whether the profiler records."""
    return profiler._is_profiler_enabled


def region(name: str) -> AbstractContextManager[Any]:
    """A region ``tvmbridge::name`` of the profiler, if it records."""
    if not profiler._is_profiler_enabled:
        return _OFF
    return torch.profiler.record_function(f"tvmbridge::{name}")
