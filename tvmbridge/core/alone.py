"""Whether code is compiled that will run without PyTorch's kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar

from tvmbridge.core.set_within import set_within

_alone: ContextVar[bool] = ContextVar("tvmbridge_alone", default=False)


def runs_alone() -> bool:
    """Whether the code will run without PyTorch, so that no kernel of PyTorch may be preferred."""
    return _alone.get()


def code_runs_alone() -> AbstractContextManager[object]:
    """Compile code that runs without PyTorch within the context."""
    return set_within(_alone, True)
