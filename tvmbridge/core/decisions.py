"""Decisions that a compilation makes by sizes, taken alike where it is made for several sizes.

How many lanes a vector loop has, into how many parts a loop is cut and which library multiplies
depend on sizes. Code for a few sizes that is to become code for any must differ in numbers alone:
its decisions are recorded at each of them, brought together, and repeated.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from tvmbridge.core.errors import BuildError

_T = TypeVar("_T")


class Rule(enum.Enum):
    """Whose decision holds for all sizes.

    ``LEAST``: that for the smallest sizes, since code for larger ones would not be right for them;
    ``MOST``: that for the largest ones; ``MIDDLE``: any is right, and that for common sizes fast.
    """

    LEAST = "least"
    MIDDLE = "middle"
    MOST = "most"


class _Recorded:
    def __init__(self) -> None:
        self.decisions: list[tuple[Rule, Any]] = []


class _Repeated:
    def __init__(self, decisions: Sequence[Any]) -> None:
        self.left = list(reversed(decisions))


_now: ContextVar[_Recorded | _Repeated | None] = ContextVar("decisions", default=None)


def decided(rule: Rule, decide: Callable[[], _T]) -> _T:
    """What ``decide()`` says, or what was decided before where decisions are repeated."""
    now = _now.get()
    if isinstance(now, _Repeated):
        if not now.left:
            raise BuildError("compiled for other sizes, more is decided by them")
        repeated: _T = now.left.pop()
        return repeated
    decision = decide()
    if now is not None:
        now.decisions.append((rule, decision))
    return decision


def sizes_vary() -> bool:
    """Whether what is compiled now stands for code for other sizes, too."""
    return _now.get() is not None


@contextmanager
def recorded_decisions() -> Iterator[list[tuple[Rule, Any]]]:
    """The list that the decisions within it are appended to."""
    recorded = _Recorded()
    token = _now.set(recorded)
    try:
        yield recorded.decisions
    finally:
        _now.reset(token)


@contextmanager
def repeated_decisions(decisions: Sequence[Any]) -> Iterator[None]:
    """Within it decisions are those given, in their order.

    Raises:
        BuildError: there are more or fewer.
    """
    repeated = _Repeated(decisions)
    token = _now.set(repeated)
    try:
        yield
    finally:
        _now.reset(token)
    if repeated.left:
        raise BuildError("compiled for other sizes, less is decided by them")


def agreed(
    least: Sequence[tuple[Rule, Any]],
    middle: Sequence[tuple[Rule, Any]],
    most: Sequence[tuple[Rule, Any]],
) -> list[Any]:
    """The decisions that hold for all sizes, from those for small, common and large ones.

    Raises:
        BuildError: they are not decisions of the same things.
    """
    if len({tuple(rule for rule, _ in each) for each in (least, middle, most)}) > 1:
        raise BuildError("for other sizes other things are decided by them")
    found = []
    for (rule, small), (_, common), (_, large) in zip(least, middle, most, strict=True):
        if rule is Rule.LEAST and small != common:
            # Not a power of two only where it is a size itself.
            found.append(1 << small.bit_length() - 1)
        else:
            found.append({Rule.LEAST: small, Rule.MIDDLE: common, Rule.MOST: large}[rule])
    return found
