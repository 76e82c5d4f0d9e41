"""Give a context variable a value within a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

_T = TypeVar("_T")


@contextmanager
def set_within(variable: ContextVar[_T], value: _T) -> Iterator[_T]:
    """Give ``variable`` this value within the context, and yield it; afterwards the former one."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
