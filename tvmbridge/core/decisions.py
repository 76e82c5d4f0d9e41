"""Compiler decisions that depend on sizes, made equal for all sample sizes of symbolic code.

Sizes decide how many lanes a vector loop has, how a loop is split, and which library multiplies.
tvmbridge compiles a module for a few sample sizes, and generalizes the results to code for any
size. The results may therefore differ in numbers alone. Decisions are recorded at each sample,
combined into decisions that hold for all sizes, and repeated at each sample.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

from tvmbridge.core.errors import BuildError
from tvmbridge.core.set_within import set_within

_T = TypeVar("_T")


class Rule(enum.Enum):
    """How decisions at several sample sizes are combined into one decision for all sizes.

    - ``LEAST``: take the decision at the smallest sizes, see :func:`fitting`; others would be wrong
      for these sizes.
    - ``MIDDLE``: take the decision at common sizes: every decision is correct, and this one fast.
    - ``MOST``: take the decision at the largest sizes.
    - ``ALWAYS``: yes if it is yes at all samples.
    - ``FACT``: take the decision at common sizes, see :func:`simplifies`.
    - ``DIVIDES``: whether a number divides another for all sizes; at the samples it may do so by
      chance.
    """

    LEAST = "least"
    MIDDLE = "middle"
    MOST = "most"
    ALWAYS = "always"
    FACT = "fact"
    DIVIDES = "divides"


# The value of a decision that is not made yet.
OPEN: Any = object()


@dataclass(frozen=True, eq=False)
class _Multiple:
    """A decision that is true if ``extent`` is a multiple of ``divisor``, unless ``never``."""

    extent: int
    divisor: int
    never: bool = False

    def __bool__(self) -> bool:
        return not self.never and self.extent % self.divisor == 0

    def __eq__(self, other: object) -> bool:
        return bool(self) == bool(other)


@dataclass(frozen=True, eq=False)
class Fitting:
    """A decision such as a number of lanes, which extents limit.

    - ``fits``: returns what is decided for such extents.
    - ``extents``: the extents.
    - ``chosen``: what is decided for all sizes; None: not known yet.
    - ``samples``: the extents at each sample size, where ``chosen`` is known.
    """

    fits: Callable[..., int]
    extents: tuple[int, ...]
    chosen: int | None = None
    samples: tuple[tuple[int, ...], ...] = ()

    def __int__(self) -> int:
        return self.fits(*self.extents) if self.chosen is None else self.chosen

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fitting) and int(self) == int(other)

    __hash__ = None  # type: ignore[assignment]


# Rules by which the decision for all sizes is at most that at any sample.
NARROWED = (Rule.LEAST, Rule.ALWAYS, Rule.DIVIDES)


def _narrowed(here: Any, bound: Any) -> Any:
    """Return the decision ``here``, but at most ``bound``."""
    if isinstance(here, Fitting):
        return replace(here, chosen=min(int(here), int(bound)))
    if isinstance(here, _Multiple):
        return replace(here, never=not bound)
    return here and bool(bound)


class Decision(NamedTuple):
    """One decision.

    - ``rule``: how it is combined with the decisions at other sample sizes.
    - ``place``: the place in the compiler's source that decides.
    - ``value``: what is decided.
    """

    rule: Rule
    place: tuple[str, int]
    value: Any

    def is_like(self, other: Decision | None) -> bool:
        """Whether the same place has made both decisions."""
        return other is not None and (self.rule, self.place) == (other.rule, other.place)

    def with_value(self, value: Any) -> Decision:
        """Return the same decision with another value."""
        return Decision(self.rule, self.place, value)


class Remembered(NamedTuple):
    """A result, with the decisions that it came from."""

    decisions: list[Decision]
    result: Any


# Results of one recording, by the key given to :func:`remembered`.
Results: TypeAlias = dict[str, Remembered]


class _Recorded:
    def __init__(self, like: Sequence[Decision], results: Results) -> None:
        self.decisions: list[Decision] = []
        self.like = list(reversed(like))
        self.results = results

    def follow(self, rule: Rule, place: tuple[str, int], decide: Callable[[], Any]) -> Any:
        """Record and return the decision for all sizes, if it is known, or else ``decide()``."""
        made = Decision(rule, place, OPEN)
        if self.like and made.is_like(self.like[-1]):
            made = self.like.pop()
        else:  # from here on, another place may make each decision
            self.like.clear()
        if made.value is OPEN:
            made = made.with_value(decide())
        elif rule in NARROWED:
            made = made.with_value(_narrowed(decide(), made.value))
        self.decisions.append(made)
        return made.value

    def remember(self, key: str, make: Callable[[], Any]) -> Any:
        """Return ``make()``, and keep it with the decisions that it makes."""
        first = len(self.decisions)
        result = make()
        self.results[key] = Remembered(self.decisions[first:], result)
        return result


class _Repeated:
    def __init__(self, decisions: Sequence[Decision], results: Results) -> None:
        self.left = list(reversed(decisions))
        self.results = results

    def follow(self, rule: Rule, place: tuple[str, int], _: Callable[[], Any]) -> Any:
        """Return the next of the recorded decisions."""
        known = self.left.pop() if self.left else None
        if known is None or not Decision(rule, place, OPEN).is_like(known):
            raise BuildError("compiled for other sizes, other things are decided by them")
        return known.value

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

    def skip(self, key: str) -> None:
        """Leave out the decisions that were noted with ``key``."""
        for known in self.results[key].decisions if key in self.results else ():
            if not self.left or not known.is_like(self.left.pop()):
                raise BuildError("compiled for other sizes, other things are decided by them")


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
        with at_one_size():
            return decide()

    caller = sys._getframe(2 if rule in _NAMED else 1)
    decision: _T = now.follow(rule, (caller.f_code.co_filename, caller.f_lineno), alone)
    return decision


# Rules with a function of their own, whose caller decides.
_NAMED = (Rule.DIVIDES, Rule.FACT, Rule.LEAST)


def fitting(fits: Callable[..., int], *extents: int) -> int:
    """Return ``fits(*extents)`` at the smallest sizes, such as the number of lanes that fit a row.

    Args:
        fits: returns a number that must not grow where the extents become smaller. Code is also
            right with a smaller number.
    """
    return int(decided(Rule.LEAST, lambda: Fitting(fits, extents)))


class OtherFactError(BuildError):
    """A fact that simplifies the code at the first sample sizes is not known at others."""


# Whether facts about values are used.
_facts: ContextVar[bool] = ContextVar("facts", default=True)


def simplifies(here: bool) -> bool:
    """Whether to use a fact about a value, such as that a factor is one, to simplify the code.

    A fact that is true at the first sample sizes must be true at all; one that is true at others
    alone is not used.

    Args:
        here: whether the fact is true at these sizes; False if this is not known.

    Raises:
        OtherFactError: the fact is true at the first sample sizes, and not known at these.
    """
    chosen = decided(Rule.FACT, lambda: here and _facts.get())
    if chosen and not here:
        raise OtherFactError("what simplifies the code at some sizes is not true at others")
    return chosen


def without_facts() -> AbstractContextManager[object]:
    """Within the context, let :func:`simplifies` use no fact."""
    return set_within(_facts, False)


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


def noted(key: str, make: Callable[[], _T]) -> _T:
    """Return ``make()``, and note its decisions for :func:`skip`."""
    now = _now.get()
    result: _T = now.remember(key, make) if isinstance(now, _Recorded) else make()
    return result


def skip(key: str) -> None:
    """Leave out the decisions of ``key``, where its result follows from the recorded one."""
    now = _now.get()
    if isinstance(now, _Repeated):
        now.skip(key)


def at_one_size() -> AbstractContextManager[object]:
    """Within the context, record no decisions and let :func:`sizes_vary` return False."""
    return set_within(_now, None)


def sizes_vary() -> bool:
    """Whether the current compilation is one sample of code that will serve other sizes too."""
    return _now.get() is not None


# Whether an amount of padding depends on sizes in the current compilation.
_padding: ContextVar[bool] = ContextVar("padding", default=False)


def padding_varies() -> bool:
    """Whether padding may add elements at some sizes of the current compilation and not at others.

    The rows that halving an odd image loses are an example.
    """
    return _padding.get()


@contextmanager
def padding_by_sizes(varies: bool) -> Iterator[None]:
    """Within the context, let :func:`padding_varies` return ``varies``."""
    with set_within(_padding, varies):
        yield


@contextmanager
def recorded_decisions(
    like: Sequence[Decision] = (), results: Results | None = None
) -> Iterator[list[Decision]]:
    """Record the decisions made within this context, and yield the list of them.

    Args:
        like: decisions from :func:`followed`, which replace new ones if they are known already.
    """
    recorded = _Recorded(like, {} if results is None else results)
    with set_within(_now, recorded):
        yield recorded.decisions


@contextmanager
def repeated_decisions(
    decisions: Sequence[Decision], results: Results | None = None
) -> Iterator[None]:
    """Repeat ``decisions``, in their order, within this context.

    Args:
        results: the results of a recording of the same code, for :func:`remembered`.

    Raises:
        BuildError: the code within the context makes more, fewer or other decisions.
    """
    repeated = _Repeated(decisions, {} if results is None else results)
    with set_within(_now, repeated):
        yield
    if repeated.left:
        raise BuildError("compiled for other sizes, less is decided by them")
