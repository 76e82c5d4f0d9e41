"""Sample sizes: the points at which a module is compiled to get code for all sizes in between.

The sizes are primes, or twice a prime, so that few numbers divide them and no two dimensions are
equal by accident. No small number divides the difference of the smallest and the largest size, so
that their remainders differ as well.
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
# The largest size of the code, as a multiple of the largest size that calls had.
_FAR = 8
# The smallest sizes to compile at: sizes of 0 and 1 behave differently in broadcasting, and 2 is
# too common a number.
_LEAST = (3, 5, 7, 11, 17)
_SMALL_DIVISORS = 2 * 3 * 5 * 7
# Upper limits that are tried in order, since forward itself may limit the sizes.
_LIMITS = tuple(1 << i for i in range(40, 4, -1))


class DemandedSizeError(CaptureError):
    """Forward requires fixed sizes of ``dimensions``, which were declared or taken as symbols."""

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
    """Choose the points at which to compile, so that forward takes the same branches at all.

    Args:
        relations: the conditions on sizes under which forward takes the branches of its trace.
        symbols: the symbolic dimensions.
        sample: arguments of some size.
        smallest: candidates for the smallest sizes, tried in order; see :func:`points_for`.
        largest: the largest sizes that calls had.
        names: the names of the arguments' leaves, for messages.

    Raises:
        DemandedSizeError: forward requires a fixed size of a symbolic dimension.
        CaptureError: forward takes other branches at all points that were tried.
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
    """Return the upper bound of a symbol; ``largest`` is its largest value in calls."""
    scale, offset = symbols.form(dimension)
    most = (relations.most(*dimension) - offset) // scale
    return most if scale == 1 else min(most, _FAR * max(largest, -(-_LANES // scale)))


def points_for(
    smallest: Point, largest: Point, bounds: Sequence[int], *, tight: bool = False
) -> Points | None:
    """Choose the points at which to compile for a wide range around the sizes of calls.

    Args:
        smallest: the smallest value of each symbol that calls had.
        largest: the largest value of each symbol that calls had.
        bounds: the upper bound of each symbol.
        tight: whether the range must not extend far below ``smallest``.

    Returns:
        The points; None if there are no suitable sizes.
    """
    taken: set[int] = set()
    most, middle, least = [], [], []
    for low, high, bound in zip(smallest, largest, bounds, strict=True):
        # Several symbols may be 2 at the smallest point, since they differ at the other points.
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
    """Return corners of the range in which one symbol is large; none for a single symbol."""
    if len(least) == 1:
        return ()
    return tuple((*least[:i], most[i], *least[i + 1 :]) for i in range(len(least) - 1))


def _small(size: int, taken: set[int], tight: bool) -> int | None:
    """Return a size at or well below ``size``, since later calls may be smaller; None if none."""
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
    """Return the largest suitable size from ``least`` to ``limit``; None if there is none.

    It is a prime or twice a prime, and no small number divides its difference from ``bottom``, the
    smallest size. A remainder that TVM has folded into a constant then differs between the points,
    and is noticed.
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
    """Return the greatest prime from ``least`` to ``limit``, ``rest`` more than a multiple of
    ``modulus``.

    A prime one below a power of two is left out. Code for caches computes sizes plus one. At such
    a prime the sum would be a power of two, and look like a number of lanes or tiles.
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
