"""The least sizes that symbolic code serves follow from the decisions that extents limit."""

from __future__ import annotations

from functools import partial

import pytest

from tvmbridge.core.common_decisions import agreed
from tvmbridge.core.decisions import (
    Results,
    Rule,
    decided,
    fitting,
    noted,
    recorded_decisions,
    repeated_decisions,
    simplifies,
    skip,
)
from tvmbridge.core.errors import BuildError
from tvmbridge.symbolic.least import least_sizes, lowest
from tvmbridge.symbolic.size import Point
from tvmbridge.symbolic.sizes import Sizes

# Rows and columns.
POINTS = [(31, 37), (449, 463), (449, 7), (5, 463), (5, 7)]


def _lanes(extent: int) -> int:
    return min(16, 1 << extent.bit_length() - 1)


def _least(sizes: Sizes, decide: object) -> Point:
    recorded = []
    for point in sizes.points:
        with recorded_decisions() as decisions:
            decide(*point)  # type: ignore[operator]
        recorded.append(decisions)
    decisions, agree = agreed(recorded, sizes.content, lowest=partial(lowest, sizes))
    assert agree
    return least_sizes(decisions, sizes)


def test_code_serves_all_sizes_for_which_its_lanes_fit() -> None:
    sizes = Sizes(POINTS)
    assert _least(sizes, lambda rows, columns: fitting(_lanes, 8 * rows)) == (2, 1)
    assert _least(sizes, lambda rows, columns: fitting(_lanes, 16 * rows)) == (1, 1)
    # Four lanes fit the seven columns of the smallest sample, and four columns.
    assert _least(sizes, lambda rows, columns: fitting(_lanes, columns)) == (1, 4)
    # Sixteen lanes fit 35 elements, and 3 rows of 7 columns.
    assert _least(sizes, lambda rows, columns: fitting(_lanes, rows * columns)) == (3, 6)
    # Of one column none is left, which is no extent of a loop that has lanes.
    assert _least(sizes, lambda rows, columns: fitting(lambda n: 1, columns - 1)) == (1, 2)


def test_lanes_fit_an_extent_that_is_smaller_at_larger_sizes() -> None:
    rests = {point: 464 - point[1] for point in POINTS}
    recorded = []
    for point in POINTS:
        with recorded_decisions() as decisions:
            fitting(_lanes, rests[point])
        recorded.append(decisions)
    (decision,), _ = agreed(recorded)
    assert int(decision.value) == 1


def test_an_extent_that_is_no_function_of_the_symbols_leaves_the_smallest_sample() -> None:
    odd = dict(zip(POINTS, (3, 100, 57, 91, 2), strict=True))
    least = _least(Sizes(POINTS), lambda *point: fitting(lambda n: 1, odd[point]))
    assert least == POINTS[-1]


def test_lanes_are_decided_for_smaller_sizes_than_the_samples_if_these_shall_be_served() -> None:
    least = _least(
        Sizes([*POINTS[:2], (2, 2)], least=(1, 1)), lambda rows, columns: fitting(_lanes, columns)
    )
    assert least == (1, 1)


def _lower(known: bool) -> int:
    """Decide about a mask in a capture, unless it is known, and then about a size."""
    if known:
        skip("capture")
    else:
        noted("capture", lambda: simplifies(False))
    return decided(Rule.MIDDLE, lambda: 3)


def test_decisions_of_a_result_that_is_known_at_other_sizes_are_left_out() -> None:
    made: Results = {}
    with recorded_decisions(results=made) as decisions:
        _lower(known=False)
    for known in (True, False):
        with repeated_decisions(decisions, made):
            assert _lower(known) == 3
    # Without the note the decisions about the mask come first.
    with pytest.raises(BuildError, match="other things"), repeated_decisions(decisions):
        _lower(known=True)
