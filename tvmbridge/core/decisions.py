"""Compiler decisions that depend on sizes, made equal for all sample sizes of symbolic code.

Sizes decide how many lanes a vector loop has, how a loop is split, and which library multiplies.
tvmbridge compiles a module for a few sample sizes, and generalizes the results to code for any
size. The results may therefore differ in numbers alone. Decisions are recorded at each sample,
combined into decisions that hold for all sizes, and repeated at each sample.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias, TypeVar

from tvmbridge.core.errors import BuildError

_T = TypeVar("_T")


class Rule(enum.Enum):
    """How decisions at several sample sizes are combined into one decision for all sizes.

    - ``LEAST``: take the decision at the smallest sizes; others would be wrong for these sizes.
    - ``MIDDLE``: take the decision at common sizes: every decision is correct, and this one fast.
    - ``MOST``: take the decision at the largest sizes.
    - ``ALWAYS``: yes if it is yes at all samples.
    - ``DIVIDES``: whether a number divides another for all sizes; at the samples it may do so by
      chance.
    """

    LEAST = "least"
    MIDDLE = "middle"
    MOST = "most"
    ALWAYS = "always"
    DIVIDES = "divides"


_OPEN: Any = object()


class _Multiple:
    """A decision that is true if ``extent`` is a multiple of ``divisor``."""

    def __init__(self, extent: int, divisor: int) -> None:
        self.extent = extent
        self.divisor = divisor

    def __bool__(self) -> bool:
        return self.extent % self.divisor == 0

    def __eq__(self, other: object) -> bool:
        return bool(self) == bool(other)


class Remembered(NamedTuple):
    """A result, with the decisions that it came from."""

    decisions: list[tuple[Rule, Any]]
    result: Any


# Results of one recording, by the key given to :func:`remembered`.
Results: TypeAlias = dict[str, Remembered]


class _Recorded:
    def __init__(self, like: Sequence[tuple[Rule, Any]], results: Results) -> None:
        self.decisions: list[tuple[Rule, Any]] = []
        self.like = like
        self.results = results

    def follow(self, rule: Rule, decide: Callable[[], Any]) -> Any:
        """Record and return the decision for all sizes, if it is known, or else ``decide()``."""
        number = len(self.decisions)
        decision: Any = _OPEN
        if number < len(self.like) and self.like[number][0] is rule:
            decision = self.like[number][1]
        if decision is _OPEN:
            decision = decide()
        self.decisions.append((rule, decision))
        return decision

    def remember(self, key: str, make: Callable[[], Any]) -> Any:
        """Return ``make()``, and keep it with the decisions that it makes."""
        first = len(self.decisions)
        result = make()
        self.results[key] = Remembered(self.decisions[first:], result)
        return result


class _Repeated:
    def __init__(self, decisions: Sequence[tuple[Rule, Any]], results: Results) -> None:
        self.left = list(reversed(decisions))
        self.results = results

    def follow(self, rule: Rule, _: Callable[[], Any]) -> Any:
        """Return the next of the recorded decisions."""
        known, repeated = self.left.pop() if self.left else (None, None)
        if known is not rule:
            raise BuildError("compiled for other sizes, other things are decided by them")
        return repeated

    def remember(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the result kept for ``key`` if its decisions come next, otherwise ``make()``."""
        kept = self.results.get(key)
        if kept is None:
            return make()
        rest = len(self.left) - len(kept.decisions)
        if rest < 0 or self.left[rest:] != kept.decisions[::-1]:
            return make()
        del self.left[rest:]
        return kept.result


_now: ContextVar[_Recorded | _Repeated | None] = ContextVar("decisions", default=None)


def decided(rule: Rule, decide: Callable[[], _T]) -> _T:
    """Return the result of ``decide()``, or the recorded decision if decisions are repeated.

    No decisions are recorded inside ``decide``: it may compile and time kernels for one size, which
    it does only for kernels that were not timed before.
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
    """Whether ``extent`` is a multiple of ``divisor`` at all sizes that the code must serve."""
    return bool(decided(Rule.DIVIDES, lambda: _Multiple(extent, divisor)))


def remembered(key: str, make: Callable[[], _T]) -> _T:
    """Return ``make()``, or its result in the recording if the decisions to repeat are the same.

    Args:
        key: what is made; each key is used once in a recording.
        make: makes it by its arguments and decisions alone.
    """
    now = _now.get()
    if now is None:
        return make()
    result: _T = now.remember(key, make)
    return result


def sizes_vary() -> bool:
    """Whether the current compilation is one sample of code that will serve other sizes too."""
    return _now.get() is not None


@contextmanager
def recorded_decisions(
    like: Sequence[tuple[Rule, Any]] = (), results: Results | None = None
) -> Iterator[list[tuple[Rule, Any]]]:
    """Record the decisions made within this context, and yield the list of them.

    Args:
        like: decisions from :func:`followed`, which replace new ones if they are known already.
        results: receives what :func:`remembered` makes.
    """
    recorded = _Recorded(like, {} if results is None else results)
    token = _now.set(recorded)
    try:
        yield recorded.decisions
    finally:
        _now.reset(token)


@contextmanager
def repeated_decisions(
    decisions: Sequence[tuple[Rule, Any]], results: Results | None = None
) -> Iterator[None]:
    """Repeat ``decisions``, in their order, within this context.

    Args:
        decisions: the decisions.
        results: the results of a recording of the same code, for :func:`remembered`.

    Raises:
        BuildError: the code within the context makes more, fewer or other decisions.
    """
    repeated = _Repeated(decisions, {} if results is None else results)
    token = _now.set(repeated)
    try:
        yield
    finally:
        _now.reset(token)
    if repeated.left:
        raise BuildError("compiled for other sizes, less is decided by them")


def followed(recorded: Sequence[Sequence[tuple[Rule, Any]]]) -> list[tuple[Rule, Any]]:
    """Return the decisions that the earlier recordings already fix for all sizes.

    The first recording is at common sizes and fixes ``MIDDLE`` decisions. The second is at the
    largest sizes and fixes ``MOST`` decisions. All others remain open.
    """
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
    """Combine the decisions recorded at several sample sizes into decisions for all sizes.

    Args:
        recorded: the recordings: first at common sizes, then at the largest, last at the smallest.
        content: takes the values of a number at all samples, and returns a divisor of that number
            at every size.

    Raises:
        BuildError: the recordings do not contain the same kinds of decisions.
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
        # Only a decision that is itself a size may be no power of two; round it down.
        return 1 << small.bit_length() - 1
    return {Rule.LEAST: small, Rule.MIDDLE: common, Rule.MOST: large}[rule]
