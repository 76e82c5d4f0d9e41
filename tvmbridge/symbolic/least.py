"""The least sizes that symbolic code serves, from the decisions that extents limit.

Loops of eight lanes need rows of eight elements. If the rows are as long as a sequence, the code is
for lengths from 8 on. If the rows are as long as a layer is wide, the code is for all lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvmbridge.core.decisions import Decision, Fitting
from tvmbridge.symbolic.size import Point, Size
from tvmbridge.symbolic.sizes import Sizes


def least_sizes(decisions: Sequence[Decision], sizes: Sizes) -> Point:
    """Return the least value of each symbol for which all ``decisions`` are right.

    Returns:
        At most the smallest sample sizes, and at least 1.
    """
    fitted = [made.value for made in decisions if isinstance(made.value, Fitting)]
    limits = [_limit(each, sizes) for each in fitted]
    points = sizes.points
    smallest = points[-1]
    known = [limit for limit in limits if limit is not None]
    if len(known) < len(limits):
        return smallest

    def hold(point: Point) -> bool:
        return all(limit(point) for limit in known)

    found = smallest
    for place in range(len(smallest)):
        lower = ((*found[:place], n, *found[place + 1 :]) for n in range(1, found[place]))
        found = next((p for p in lower if all(map(hold, [p, *_with(points, p, place)]))), found)
    return found


def lowest(sizes: Sizes, values: Sequence[int]) -> int:
    """Return a number of the code at the least sizes that it shall serve.

    Args:
        values: the number at each sample size.
    """
    size = sizes.find(tuple(values))
    return values[-1] if size is None else size.at(sizes.least)


def _with(points: Sequence[Point], like: Point, place: int) -> list[Point]:
    """Return ``points`` with the size that ``like`` has at ``place``."""
    return [(*p[:place], like[place], *p[place + 1 :]) for p in points]


def _limit(made: Fitting, sizes: Sizes) -> Callable[[Point], bool] | None:
    """Return whether the decision is right at a point; None if its extents are not known there."""
    extents: list[Size] = []
    for values in zip(*made.samples, strict=True):
        size = sizes.find(values)
        if size is None:
            return None
        extents.append(size)

    def holds(point: Point) -> bool:
        at = [size.at(point) for size in extents]
        return min(at, default=1) >= 1 and made.fits(*at) >= int(made)

    return holds
