"""Leave most cases of a long parametrisation to the slow tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def but_slow(cases: Iterable[Any], *slow: Any) -> list[Any]:
    """Return parameters of a test: those of ``cases`` that are among ``slow`` are slow tests."""
    return [_parameter(case, case in slow) for case in cases]


def thinned(cases: Iterable[Any], step: int) -> list[Any]:
    """Return parameters of a test: every ``step``-th of ``cases`` is quick, the others are slow.

    In a product of lists, ``step`` should share no divisor with the length of the last list, so
    that each of its elements occurs in a quick case.
    """
    return [_parameter(case, number % step != 0) for number, case in enumerate(cases)]


def covering(*lists: Sequence[Any]) -> list[Any]:
    """Return parameters of a test: the product of lists that do not depend on each other.

    Quick cases have each element of each list; the others are slow.
    """
    count = max(map(len, lists))
    quick = {tuple(number % len(each) for each in lists) for number in range(count)}
    places = itertools.product(*map(range, map(len, lists)))
    return [
        _parameter(tuple(each[i] for each, i in zip(lists, at, strict=True)), at not in quick)
        for at in places
    ]


def _parameter(case: Any, is_slow: bool) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=[pytest.mark.slow] if is_slow else [])
