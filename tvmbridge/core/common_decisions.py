"""Combine the decisions at several sample sizes into decisions for all sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tvmbridge.core.decisions import NARROWED, OPEN, Decision, Fitting, Rule


def followed(
    recorded: Sequence[Sequence[Decision]], known: Sequence[Decision] = ()
) -> list[Decision]:
    """Return what the earlier recordings say of the decisions for all sizes.

    The first recording is at common sizes and fixes ``MIDDLE`` decisions. The second is at the
    largest sizes and fixes ``MOST`` decisions. The third is at the smallest sizes, and shows bounds
    of the decisions that are ``NARROWED``. All others remain open, after the ``known`` ones.
    """
    found = list(known)
    common, *others = [*recorded, (), (), ()][:3]
    rest = itertools.islice(itertools.zip_longest(common, *others), len(known), None)
    for made, at_most, at_least in rest:
        if made is None:
            break
        if made.rule is Rule.MOST and made.is_like(at_most):
            made = at_most
        elif made.rule in NARROWED and made.is_like(at_least):
            made = made.with_value(_bound(made, at_least))
        elif made.rule not in (Rule.MIDDLE, Rule.FACT):
            made = made.with_value(OPEN)
        found.append(made)
    return found


def _bound(common: Decision, small: Decision) -> Any:
    """Return what a decision for all sizes is at most, by those at common and smallest sizes."""
    if common.rule is Rule.LEAST:
        return _rounded(min(int(common.value), int(small.value)), int(common.value))
    return bool(common.value) and bool(small.value)


def _rounded(chosen: int, common: int) -> int:
    """Return ``chosen``; if it differs from ``common``, the power of two at most as large.

    Only a decision that is itself a size may be no power of two.
    """
    return chosen if chosen in (0, common) else 1 << chosen.bit_length() - 1


def _itself(values: Sequence[int]) -> int:
    return values[0] if len(set(values)) == 1 else 1


def _last(values: Sequence[int]) -> int:
    return values[-1]


def agreed(
    recorded: Sequence[Sequence[Decision]],
    content: Callable[[Sequence[int]], int] = _itself,
    known: Sequence[Decision] = (),
    lowest: Callable[[Sequence[int]], int] = _last,
) -> tuple[list[Decision], bool]:
    """Combine the decisions recorded at several sample sizes into decisions for all sizes.

    Where a decision differs between the samples, the decisions after it may be of other kinds.
    Recordings that follow the decisions returned have further decisions in common.

    Args:
        recorded: the recordings: first at common sizes, then at the largest, last at the smallest.
        content: takes the values of a number at all samples, and returns a divisor of that number
            at every size.
        known: the first decisions, which the recordings followed.
        lowest: takes the values of a number at all samples, and returns its least value.

    Returns:
        The decisions up to the first that is of another kind in some recording, and whether these
        are all decisions.
    """
    found = list(known)
    together = itertools.islice(itertools.zip_longest(*recorded), len(known), None)
    for each in together:
        first = each[0]
        if first is None or not all(map(first.is_like, each)):
            return found, False
        values = [other.value for other in each]
        if first.rule is Rule.LEAST:
            value = _fitting_all(values, lowest)
        else:
            value = _for_all(first.rule, values, content)
        found.append(first.with_value(value))
    return found, True


def _for_all(rule: Rule, decisions: Sequence[Any], content: Callable[[Sequence[int]], int]) -> Any:
    common, large = decisions[:2]
    if rule is Rule.ALWAYS:
        return all(decisions)
    if rule is Rule.DIVIDES:
        whole = content([d.extent for d in decisions])
        return all(whole % d.divisor == 0 for d in decisions)
    return large if rule is Rule.MOST else common


def _fitting_all(decisions: Sequence[Fitting], lowest: Callable[[Sequence[int]], int]) -> Fitting:
    """Return the decision for the least extents."""
    samples = tuple(each.extents for each in decisions)
    least = [lowest(values) for values in zip(*samples, strict=True)]
    small = decisions[-1]
    chosen = small.fits(*least) if min(least, default=1) >= 1 else int(small)
    # Extents such as the rest of a table are smaller at larger sizes.
    chosen = _rounded(min(chosen, *map(int, decisions)), int(decisions[0]))
    return replace(small, chosen=chosen, samples=samples)
