"""Choose the sample sizes (points) at which a module is compiled to get code for any size.

Sample sizes are primes or twice a prime, so that few numbers divide them and no two dimensions
agree by chance. No small prime divides the difference of the smallest and the largest size. Their
remainders by small numbers therefore differ as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tvmbridge.calls.arguments import Arguments
from tvmbridge.core.errors import CaptureError
from tvmbridge.core.torch_private import OpOverload, pytree
from tvmbridge.graph_capture.any_size import SymbolicTrace, shapes_of
from tvmbridge.graph_capture.relations import Relations
from tvmbridge.symbolic.points import Points
from tvmbridge.symbolic.size import Point, Size, alike, proportional
from tvmbridge.symbolic.symbols import LEAST_SIZE, Dimension, Symbols
from tvmbridge.symbolic.traced import traced_sizes

_LANES = 64
# The largest sample size is this many times the largest size that calls had.
_FAR = 8
# Candidates for the smallest sample size: 0 and 1 have another meaning in broadcasting, and 2
# equals many other numbers in code.
_LEAST = (3, 5, 7, 11, 17)
# Up to this number there are four primes for the common sizes of symbols. Sizes just above the
# smallest sample sizes have the same quotients as these, and further points must tell them apart.
_COMMON = 47
# Up to this bound a symbol has so few sizes that each may have code of its own.
_FEW = 16
# How many points are added to tell sizes of a trace apart.
_MOST_MORE = 3
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


class OtherBranchError(CaptureError):
    """Forward takes another branch at the sample sizes than at the sizes that were traced.

    - ``sizes``: how many sizes calls may have on the branch that was traced; 0: there are many.
    """

    def __init__(self, message: str, sizes: int) -> None:
        super().__init__(message)
        self.sizes = sizes


def points_within(
    trace: SymbolicTrace,
    symbols: Symbols,
    sample: Arguments,
    smallest: Sequence[Point],
    largest: Sequence[Point],
    names: Sequence[str],
    refused: Collection[int] = (),
    floors: Point | None = None,
) -> Points:
    """Return sample points at which all relations hold that forward assumes of sizes.

    Args:
        smallest: candidates for the smallest point, in order of preference.
        largest: the largest size of each symbol that calls had, and that the code must serve.
        refused: numbers that no size may be. The trace's static numbers are avoided where the
            code is for as small sizes without them.
        floors: the least value of each symbol that the code serves; None: that forward permits.

    Raises:
        DemandedSizeError: forward works for only one size of a dimension.
        OtherBranchError: there are no such points, since forward branches on sizes.
    """
    relations = trace.relations
    fixed = [d for group in symbols.dimensions for d in group if not relations.is_symbolic(*d)]
    if fixed:
        raise DemandedSizeError(fixed, relations, names)
    bounds = [
        min(_bound(relations, symbols, d, size) for d in group)
        for group, size in zip(symbols.dimensions, largest[1], strict=True)
    ]

    def broken_at(point: Point) -> str | None:
        try:
            return relations.broken(shapes_of(symbols.probe(*sample, point)))
        except MemoryError as error:
            return str(error)

    floors = floors or _floors(relations, symbols, sample)
    smallest = [p for least in smallest for p in (least, tuple(map(max, least, floors)))]
    broken: str | None = None
    wrong: set[int] = set()
    avoided = dict.fromkeys((static_numbers(trace), frozenset[int]()))
    # Forward may demand that one size is at most another one: its sample sizes are then smaller.
    orders = dict.fromkeys((tuple(range(len(bounds))), _descending(largest[1])))
    ways = itertools.product(dict.fromkeys(smallest), avoided, _LIMITS, (False, True), orders)
    for least, avoid, limit, tight, order in ways:
        within = [min(bound, limit) for bound in bounds]
        points = points_for(
            (least, *largest),
            within,
            tight=tight,
            avoided=avoid,
            refused=refused,
            floors=floors,
            order=order,
        )
        if points is None:
            continue
        points = replace(points, between=tuple(_permitted(points, broken_at)))
        found = {point: broken_at(point) for point in points.all}
        broken = next(filter(None, found.values()), None)
        if broken is None:
            points = replace(points, floors=tuple(floors))
            return _told_apart(points, traced_sizes(trace, symbols), broken_at)
        wrong |= _sizes_of(p for p, each in found.items() if each) - _sizes_of(
            p for p, each in found.items() if not each
        )
    if wrong - set(refused) and not refused:
        # Forward may leave out single sizes, such as that of a whole cache.
        further = {*refused, *wrong}
        return points_within(trace, symbols, sample, smallest, largest, names, further, floors)
    reason = broken or f"there are no sizes to compile for around {largest[0]}"
    message = f"forward goes another way at other sizes: {reason}"
    is_few = broken is None and max(bounds) <= _FEW
    raise OtherBranchError(message, math.prod(bounds) if is_few else 0)


def _descending(point: Point) -> tuple[int, ...]:
    """Return the numbers of the symbols, that of the largest size first."""
    return tuple(sorted(range(len(point)), key=lambda i: -point[i]))


def _permitted(points: Points, broken_at: Callable[[Point], str | None]) -> Iterator[Point]:
    """Yield the corners, with as few further large sizes as forward demands beside a large one.

    A corner is left out if forward demands all sizes to be large beside its large one.
    """
    for corner in points.between:
        raised = sorted(
            itertools.product(*({a, b} for a, b in zip(corner, points.most, strict=True))),
            key=lambda p: sum(map(int.__ne__, p, corner)),
        )
        found = next((point for point in raised if broken_at(point) is None), corner)
        if found != points.most:
            yield found


def _sizes_of(points: Iterable[Point]) -> set[int]:
    return {size for point in points for size in point}


def _told_apart(
    points: Points, traced: Sequence[Size], broken_at: Callable[[Point], str | None]
) -> Points:
    """Return ``points`` with points at which sizes of a trace differ that are alike at all others.

    Sizes are alike if they are equal, or if one is a multiple of the other plus a number.
    """
    for _ in range(_MOST_MORE):
        more = (
            point
            for _, point in (*alike(traced, points.all), *proportional(traced, points.all))
            if points.hold(point) and broken_at(point) is None
        )
        point = next(more, None)
        if point is None:
            break
        points = replace(points, between=(*points.between, point))
    return replace(points, traced=tuple(traced))


def _bound(relations: Relations, symbols: Symbols, dimension: Dimension, largest: int) -> int:
    """Return the upper bound of a dimension's symbol if ``largest`` is the largest in calls."""
    scale, offset = symbols.form(dimension)
    most = (relations.most(*dimension) - offset) // scale
    return most if scale == 1 else min(most, _FAR * max(largest, -(-_LANES // scale)))


def _floors(relations: Relations, symbols: Symbols, sample: Arguments) -> Point:
    """Return the least value of each symbol that forward permits, beside the sample's sizes.

    Of two positions one is left where forward leaves out the first, and a size of 1 is no symbol.
    """
    around = symbols.apart(shapes_of(sample))

    def holds(place: int, size: int) -> bool:
        point = (*around[:place], size, *around[place + 1 :])
        return relations.broken(shapes_of(symbols.probe(*sample, point))) is None

    def least(place: int) -> int:
        near = (n for n in range(LEAST_SIZE, _LEAST[-1]) if holds(place, n))
        return next(near, None) or _least_far(partial(holds, place), around[place])

    return tuple(map(least, range(len(around))))


def _least_far(holds: Callable[[int], bool], size: int) -> int:
    """Return a size up to ``size`` that holds, where the next smaller one does not; or 2.

    A network that halves images five times needs more than 32 rows.
    """
    if not holds(size):
        return LEAST_SIZE
    below = _LEAST[-1] - 1
    while size - below > 1:
        middle = (size + below) // 2
        size, below = (middle, below) if holds(middle) else (size, middle)
    return size


def static_numbers(trace: SymbolicTrace) -> frozenset[int]:
    """Return the static sizes in the shapes of a trace, and its operators' static numbers.

    At a point with such a size two different nodes may be equal: `arange(0, s)` at s = 3 is the
    `arange(0, 3)` of another place.
    """
    return frozenset(n for node in trace.program.graph.nodes for n in _numbers(node))


def _numbers(node: Any) -> Iterable[int]:
    for value in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor):
            yield from (size for size in value.shape if isinstance(size, int))
    if isinstance(node.target, OpOverload):
        for parameter, value in zip(node.target._schema.arguments, node.args, strict=False):
            if not parameter.name.startswith("dim"):
                yield from (n for n in pytree.tree_leaves(value) if type(n) is int)


def points_for(
    seen: tuple[Point, Point, Point],
    bounds: Sequence[int],
    *,
    tight: bool = False,
    avoided: Collection[int] = (),
    refused: Collection[int] = (),
    floors: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
) -> Points | None:
    """Return sample points whose range contains the given sizes and many others, or None.

    Args:
        seen: the smallest sizes, the largest sizes of calls, and the largest sizes to serve.
        tight: whether to stay close to the smallest sizes.
        avoided: numbers that no size may be, except a smallest size if calls have no larger one.
        refused: numbers that no size may be, except a smallest size of 2.
        floors: the least value of each symbol, which several symbols may have; None: 2.
        order: the numbers of the symbols; each has smaller sizes than those before it.
    """
    taken = {*avoided, *refused}
    used = set(refused)
    order = order or range(len(bounds))
    found: dict[int, tuple[int, int, int]] = {}
    ranges = list(zip(*seen, bounds, floors or [LEAST_SIZE] * len(bounds), strict=True))
    for symbol in order:
        low, usual, high, bound, floor = ranges[symbol]
        limit = min(_FAR * max(high, _LANES), bound)
        common = min(max(usual, low, _COMMON), bound)
        # Within narrow bounds a smaller bottom may have a generic size at the top. Forward may
        # bound a size by that of a call, such as 512: others are served then.
        bottoms = list(_bottoms(low, floor, taken, used, tight))
        ends = [*((n, high) for n in bottoms), *((n, 2 * n) for n in bottoms)]
        for bottom, least_top in ends:
            mine = {*taken, bottom}
            top = _largest(limit, mine, least_top, bottom)
            between = _prime_below(common, mine, bottom, 4, 3)
            between = between or _prime_below(common, mine, bottom)
            if top is not None and between is not None:
                break
        else:
            return None
        taken.update(mine)
        used.update((bottom, top, between))
        found[symbol] = bottom, top, between
    least, most, middle = zip(*(found[symbol] for symbol in range(len(bounds))), strict=True)
    points = Points(least, most, middle, _corners(least, most))
    return points if len(set(points.all)) == len(points.all) else None


def _corners(least: Sequence[int], most: Sequence[int]) -> tuple[Point, ...]:
    """Return, for several symbols, points at which one symbol is large and all others small.

    Each symbol is once far larger and once far smaller than each other symbol. Code that depends on
    which of two sizes is smaller, such as the length of a diagonal, therefore differs.
    """
    if len(least) == 1:
        return ()
    return tuple((*least[:i], most[i], *least[i + 1 :]) for i in range(len(least)))


def _bottoms(low: int, floor: int, taken: set[int], used: set[int], tight: bool) -> Iterable[int]:
    """Yield candidates for the smallest sample size of a symbol, the preferred one first.

    Several symbols may have their least size at the smallest point; they differ at others.
    """
    if low in (LEAST_SIZE, floor):
        yield low
        return
    first = _smallest(low, taken, used, tight)
    if first is not None and first >= floor:
        yield first
        yield from (n for n in reversed(_LEAST) if floor <= n < first and n not in taken)
    yield floor


def _smallest(size: int, taken: set[int], used: set[int], tight: bool) -> int | None:
    """Return a sample size that is not in ``taken`` if code for it serves as many calls.

    Otherwise return one that is not in ``used``. Code for a larger size serves fewer calls, and 2
    is the number of many other things.
    """
    generic, usual = (_small(size, set(each), tight) for each in (taken, used))
    return generic if generic and usual and LEAST_SIZE < generic <= usual else usual


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
