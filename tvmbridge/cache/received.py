"""Code that a compilation gets from another process, which compiles the same graph."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Protocol

from tvmbridge.cache.key import CacheKey
from tvmbridge.cache.store import Kept
from tvmbridge.core.set_within import set_within


class CodeSource(Protocol):
    """Another process that compiles the same code, or that waits for the code of this one."""

    def received(self, digest: str) -> Kept | None:
        """Return the code whose key has this digest; None: compile it here."""

    def give(self, key: CacheKey, kept: Kept) -> None:
        """Offer code to the other processes."""


_now: ContextVar[CodeSource | None] = ContextVar("source", default=None)


def source_now() -> CodeSource | None:
    """Return the source of the compilation that is running; None: it has none."""
    return _now.get()


def received_from(source: CodeSource) -> AbstractContextManager[object]:
    """Let compilations within this context get code from ``source``."""
    return set_within(_now, source)
