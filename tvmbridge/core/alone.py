"""Whether code is compiled that will run without PyTorch's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_alone: ContextVar[bool] = ContextVar("tvmbridge_alone", default=False)


def runs_alone() -> bool:
    """Whether the code will run without PyTorch, so that no kernel of PyTorch may be preferred."""
    return _alone.get()


@contextmanager
def code_runs_alone() -> Iterator[None]:
    """Compile code that runs without PyTorch within the context."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)
