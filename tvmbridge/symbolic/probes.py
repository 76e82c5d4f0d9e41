"""Choose the sample sizes (points) at which a module is compiled to get code for any size.

Sample sizes are primes or twice a prime, so that few numbers divide them and no two dimensions
agree by chance. No small prime divides the difference of the smallest and the largest size. Their
remainders by small numbers therefore differ as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from tvmbridge.core.errors import CaptureError
from tvmbridge.graph_capture.any_size import shapes_of
from tvmbridge.graph_capture.relations import Relations
from tvmbridge.graph_capture.trace.arguments import Arguments
from tvmbridge.symbolic.code import Points
from tvmbridge.symbolic.sizes import Point
from tvmbridge.symbolic.symbols import LEAST_SIZE, Dimension, Symbols

_LANES = 64
# The largest sample size is this many times the largest size that calls had.
_FAR = 8
# Candidates for the smallest sample size: 0 and 1 have another meaning in broadcasting, and 2
# equals many other numbers in code.
_LEAST = (3, 5, 7, 11, 17)
_SMALL_DIVISORS = 2 * 3 * 5 * 7
# Limits that are tried in turn, since forward may bound sizes in a way that is not analyzed.
_LIMITS = tuple(1 << i for i in range(40, 4, -1))


class DemandedSizeError(CaptureError):
    """Forward works only for the sample's sizes of ``dimensions``, which cannot be symbols."""

    def __init__(
        self, dimensions: Sequence[Dimension], relations: Relations, names: Sequence[str]
    ) -> None:
        leaf, number = dimensions[0]
        super().__init__(
            f"forward demands size {relations.shapes[leaf][number]} of dimension {number} of "
            f"argument `{names[leaf]}`"
        )
        self.dimensions = tuple(dimensions)


def points_within(
    relations: Relations,
    symbols: Symbols,
    sample: Arguments,
    smallest: Sequence[Point],
    largest: Point,
    names: Sequence[str],
) -> Points:
    """Return sample points at which all relations hold that forward assumes of sizes.

    Args:
        relations: the relations between sizes that forward assumes.
        symbols: the symbolic dimensions.
        sample: arguments of some size.
        smallest: candidates for the smallest point, in order of preference.
        largest: the largest size of each symbol that calls had.
        names: the names of the leaves of the arguments for messages.

    Raises:
        DemandedSizeError: forward works for only one size of a dimension.
        CaptureError: there are no such points, since forward branches on sizes.
    """
    fixed = [d for group in symbols.dimensions for d in group if not relations.is_symbolic(*d)]
    if fixed:
        raise DemandedSizeError(fixed, relations, names)
    bounds = [
        min(_bound(relations, symbols, d, size) for d in group)
        for group, size in zip(symbols.dimensions, largest, strict=True)
    ]
    broken: str | None = None
    ways = itertools.product(dict.fromkeys(smallest), _LIMITS, (False, True))
    for least, limit, tight in ways:
        within = [min(bound, limit) for bound in bounds]
        points = points_for(least, largest, within, tight=tight)
        if points is None:
            continue
        probes = (symbols.probe(*sample, point) for point in points.all)
        broken = next(filter(None, map(relations.broken, map(shapes_of, probes))), None)
        if broken is None:
            return points
    reason = broken or f"there are no sizes to compile for around {largest}"
    raise CaptureError(f"forward goes another way at other sizes: {reason}")


def _bound(relations: Relations, symbols: Symbols, dimension: Dimension, largest: int) -> int:
    """Return the upper bound of a dimension's symbol if ``largest`` is the largest in calls."""
    scale, offset = symbols.form(dimension)
    most = (relations.most(*dimension) - offset) // scale
    return most if scale == 1 else min(most, _FAR * max(largest, -(-_LANES // scale)))


def points_for(
    smallest: Point, largest: Point, bounds: Sequence[int], *, tight: bool = False
) -> Points | None:
    """Return sample points whose range contains the given sizes and many others.

    Args:
        smallest: the smallest size of each symbol that calls had.
        largest: the largest size of each symbol that calls had.
        bounds: the upper bound of each symbol.
        tight: whether to stay close to the smallest sizes.

    Returns:
        The points, or None if there are none.
    """
    taken: set[int] = set()
    most, middle, least = [], [], []
    for low, high, bound in zip(smallest, largest, bounds, strict=True):
        # Several symbols may have the size 2 at the smallest point; they differ at the others.
        bottom = low if low == LEAST_SIZE else _small(low, taken, tight)
        if bottom is None:
            return None
        least.append(bottom)
        top = _largest(min(_FAR * max(high, _LANES), bound), taken, high, bottom)
        common = min(max(high, 2 * _LEAST[-1]), bound)
        between = _prime_below(common, taken, least[-1], 4, 3)
        between = between or _prime_below(common, taken, least[-1])
        if top is None or between is None:
            return None
        most.append(top)
        middle.append(between)
    points = Points(tuple(least), tuple(most), tuple(middle), _corners(least, most))
    return points if len(set(points.all)) == len(points.all) else None


def _corners(least: Sequence[int], most: Sequence[int]) -> tuple[Point, ...]:
    """Return, for several symbols, points at which one symbol is large and all others small."""
    if len(least) == 1:
        return ()
    return tuple((*least[:i], most[i], *least[i + 1 :]) for i in range(len(least) - 1))


def _small(size: int, taken: set[int], tight: bool) -> int | None:
    """Return a sample size well below ``size``, since later calls may have smaller sizes."""
    if tight and size > _LEAST[-1]:
        return _prime_below(size, taken, _LEAST[-1])
    free = [n for n in (LEAST_SIZE, *_LEAST) if n <= size and n not in taken]
    if not free:
        return None
    below = [n for n in free if n <= size // 2 and n > LEAST_SIZE][-1:]
    found = free[-1:] if tight else below or free[-1:]
    taken.update(found)
    return found[0]


def _largest(limit: int, taken: set[int], least: int, bottom: int) -> int | None:
    """Return the largest sample size: a prime or twice a prime, at most ``limit``.

    No small prime divides its difference from ``bottom``, the smallest sample size. A remainder
    of the size then differs between the points. If TVM folds a remainder into an expression, the
    expressions therefore differ, and the comparison notices it.
    """
    for candidate in range(limit, least - 1, -1):
        half = candidate // 2 if candidate % 2 == 0 else candidate
        generic = candidate not in taken and _is_prime(half)
        if generic and math.gcd(candidate - bottom, _SMALL_DIVISORS) == 1:
            taken.add(candidate)
            return candidate
    return None


def _prime_below(
    limit: int, taken: set[int], least: int, modulus: int = 1, rest: int = 1
) -> int | None:
    """Return the greatest prime from ``least`` to ``limit`` with remainder ``rest`` by ``modulus``.

    A prime one below a power of two is skipped. The size plus one, which caches have, would be that
    power, and powers of two are numbers of lanes and tiles elsewhere in the code.
    """
    for candidate in range(limit, least - 1, -1):
        if (
            candidate not in taken
            and candidate % modulus == rest % modulus
            and (candidate & (candidate + 1) or candidate <= _LEAST[-1])
            and _is_prime(candidate)
        ):
            taken.add(candidate)
            return candidate
    return None


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, int(number**0.5) + 1))
