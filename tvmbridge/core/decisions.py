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
    ``ALWAYS``: yes where it is so for all. ``DIVIDES``: a number divides another for all sizes; at
    those that code is compiled for it may do so by accident.
    """

    LEAST = "least"
    MIDDLE = "middle"
    MOST = "most"
    ALWAYS = "always"
    DIVIDES = "divides"


_OPEN: Any = object()


class _Multiple:
    """Whether ``extent`` is a multiple of ``divisor``."""

    def __init__(self, extent: int, divisor: int) -> None:
        self.extent = extent
        self.divisor = divisor

    def __bool__(self) -> bool:
        return self.extent % self.divisor == 0


class _Recorded:
    def __init__(self, like: Sequence[tuple[Rule, Any]] = ()) -> None:
        self.decisions: list[tuple[Rule, Any]] = []
        self.like = like

    def follow(self, rule: Rule, decide: Callable[[], Any]) -> Any:
        """What is decided already for all sizes; else what is for these."""
        number = len(self.decisions)
        decision: Any = _OPEN
        if number < len(self.like) and self.like[number][0] is rule:
            decision = self.like[number][1]
        if decision is _OPEN:
            decision = decide()
        self.decisions.append((rule, decision))
        return decision


class _Repeated:
    def __init__(self, decisions: Sequence[tuple[Rule, Any]]) -> None:
        self.left = list(reversed(decisions))
        self.quotients: list[tuple[int, int]] = []

    def follow(self, rule: Rule, _: Callable[[], Any]) -> Any:
        """What was decided before."""
        known, repeated = self.left.pop() if self.left else (None, None)
        if known is not rule:
            raise BuildError("compiled for other sizes, other things are decided by them")
        return repeated


_now: ContextVar[_Recorded | _Repeated | None] = ContextVar("decisions", default=None)


def decided(rule: Rule, decide: Callable[[], _T]) -> _T:
    """Return what ``decide()`` returns, or an earlier decision where decisions are repeated.

    What ``decide`` calls records no decisions of its own: it may compile and time kernels for
    one size, and does so only where a kernel has not been timed before.
    """
    now = _now.get()
    if now is None:
        return decide()

    def alone() -> _T:
        token = _now.set(None)
        try:
            return decide()
        finally:
            _now.reset(token)

    decision: _T = now.follow(rule, alone)
    return decision


def divides(divisor: int, extent: int) -> bool:
    """Whether ``extent`` is a multiple of ``divisor``, at all sizes that code is for."""
    return bool(decided(Rule.DIVIDES, lambda: _Multiple(extent, divisor)))


def blocks_of(extent: int, block: int) -> int:
    """Return how many blocks of ``block`` elements hold ``extent``, the last one perhaps in part.

    Symbolic code is told of the quotient: values of a few blocks do not say what they count.
    """
    now = _now.get()
    if isinstance(now, _Repeated):
        now.quotients.append((extent, block))
    return -(-extent // block)


def sizes_vary() -> bool:
    """Whether what is compiled now stands for code for other sizes, too."""
    return _now.get() is not None


@contextmanager
def recorded_decisions(
    like: Sequence[tuple[Rule, Any]] = (),
) -> Iterator[list[tuple[Rule, Any]]]:
    """The list that the decisions within it are appended to.

    Those that :func:`followed` says are taken from ``like``.
    """
    recorded = _Recorded(like)
    token = _now.set(recorded)
    try:
        yield recorded.decisions
    finally:
        _now.reset(token)


@contextmanager
def repeated_decisions(
    decisions: Sequence[tuple[Rule, Any]],
) -> Iterator[list[tuple[int, int]]]:
    """Repeat ``decisions`` within it, in their order.

    Yields:
        the extents and blocks that :func:`blocks_of` is asked for, in their order.

    Raises:
        BuildError: there are more or fewer.
    """
    repeated = _Repeated(decisions)
    token = _now.set(repeated)
    try:
        yield repeated.quotients
    finally:
        _now.reset(token)
    if repeated.left:
        raise BuildError("compiled for other sizes, less is decided by them")


def followed(recorded: Sequence[Sequence[tuple[Rule, Any]]]) -> list[tuple[Rule, Any]]:
    """What is decided already: for common sizes, recorded first, and for the largest, second."""
    found: list[tuple[Rule, Any]] = []
    for number, (rule, decision) in enumerate(recorded[0] if recorded else ()):
        largest = recorded[1] if len(recorded) > 1 else ()
        if rule is Rule.MOST and number < len(largest):
            found.append((rule, largest[number][1]))
        else:
            found.append((rule, decision if rule is Rule.MIDDLE else _OPEN))
    return found


def _itself(values: Sequence[int]) -> int:
    return values[0] if len(set(values)) == 1 else 1


def agreed(
    recorded: Sequence[Sequence[tuple[Rule, Any]]],
    content: Callable[[Sequence[int]], int] = _itself,
) -> list[tuple[Rule, Any]]:
    """The decisions that hold for all sizes.

    Args:
        recorded: those for common sizes first, then for the largest, last for the smallest.
        content: of a number that depends on sizes, given by its values at them, what divides it at
            any size.

    Raises:
        BuildError: they are not decisions of the same things.
    """
    if len({tuple(rule for rule, _ in each) for each in recorded}) > 1:
        raise BuildError("for other sizes other things are decided by them")
    together = zip(*recorded, strict=True)
    return [(each[0][0], _for_all(each[0][0], [v for _, v in each], content)) for each in together]


def _for_all(rule: Rule, decisions: Sequence[Any], content: Callable[[Sequence[int]], int]) -> Any:
    common, large, small = decisions[0], decisions[1], decisions[-1]
    if rule is Rule.ALWAYS:
        return all(decisions)
    if rule is Rule.DIVIDES:
        whole = content([d.extent for d in decisions])
        return all(whole % d.divisor == 0 for d in decisions)
    if rule is Rule.LEAST and small != common:
        # Not a power of two only where it is a size itself.
        return 1 << small.bit_length() - 1
    return {Rule.LEAST: small, Rule.MIDDLE: common, Rule.MOST: large}[rule]
