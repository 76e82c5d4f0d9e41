"""Probes: which dimensions are symbols, where a module is compiled, and arguments of these sizes.

Sizes of probes are primes, or twice a prime, so that nothing divides them and no two dimensions
agree by accident. The smallest and the largest differ by what no small number divides: remainders
of them differ too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from tvmbridge.core.errors import CaptureError
from tvmbridge.core.torch_private import pytree
from tvmbridge.graph_capture.any_size import SymbolicTrace, shapes_of
from tvmbridge.graph_capture.relations import Relations
from tvmbridge.graph_capture.trace.arguments import Arguments
from tvmbridge.symbolic.code import Points
from tvmbridge.symbolic.sizes import Point
from tvmbridge.symbolic.symbols import LEAST_SIZE, Dimension, Symbols

_LANES = 64
# Code is for sizes so many times those that calls had.
_FAR = 8
# The smallest sizes that code may be for: 0 and 1 mean something else to broadcasting, and 2 is
# also the number of many other things.
_LEAST = (3, 5, 7, 11, 17)
_SMALL_DIVISORS = 2 * 3 * 5 * 7
# What sizes are bounded by where forward bounds them itself, in ways that are not looked into.
_LIMITS = tuple(1 << i for i in range(40, 4, -1))


class DemandedSizeError(CaptureError):
    """Forward demands the sizes of ``dimensions``, which were to be symbols."""

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
    trace: SymbolicTrace,
    symbols: Symbols,
    sample: Arguments,
    smallest: Sequence[Point],
    largest: Point,
    names: Sequence[str],
    refused: Collection[int] = (),
) -> Points:
    """Where to compile code, such that all that forward takes for granted of sizes holds there.

    Args:
        trace: the module with symbols; its relations are what forward takes for granted.
        symbols: the symbolic dimensions.
        sample: arguments of some size.
        smallest: as of :func:`points_for`; of several the first that can be.
        largest: as of :func:`points_for`.
        names: what messages call the leaves of the arguments.
        refused: numbers that no size may be. The trace's static numbers are avoided where the
            code is for as small sizes without them.

    Raises:
        DemandedSizeError: forward demands one size.
        CaptureError: it goes another way at others.
    """
    relations = trace.relations
    fixed = [d for group in symbols.dimensions for d in group if not relations.is_symbolic(*d)]
    if fixed:
        raise DemandedSizeError(fixed, relations, names)
    bounds = [
        min(_bound(relations, symbols, d, size) for d in group)
        for group, size in zip(symbols.dimensions, largest, strict=True)
    ]
    broken: str | None = None
    avoided = dict.fromkeys((static_numbers(trace), frozenset[int]()))
    ways = itertools.product(dict.fromkeys(smallest), avoided, _LIMITS, (False, True))
    for least, avoid, limit, tight in ways:
        within = [min(bound, limit) for bound in bounds]
        points = points_for(least, largest, within, tight=tight, avoided=avoid, refused=refused)
        if points is None:
            continue
        probes = (symbols.probe(*sample, point) for point in points.all)
        broken = next(filter(None, map(relations.broken, map(shapes_of, probes))), None)
        if broken is None:
            return points
    reason = broken or f"there are no sizes to compile for around {largest}"
    raise CaptureError(f"forward goes another way at other sizes: {reason}")


def _bound(relations: Relations, symbols: Symbols, dimension: Dimension, largest: int) -> int:
    """What the symbol of a dimension may not exceed where a call has had ``largest``."""
    scale, offset = symbols.form(dimension)
    most = (relations.most(*dimension) - offset) // scale
    return most if scale == 1 else min(most, _FAR * max(largest, -(-_LANES // scale)))


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
    if isinstance(node.target, torch._ops.OpOverload):
        for parameter, value in zip(node.target._schema.arguments, node.args, strict=False):
            if not parameter.name.startswith("dim"):
                yield from (n for n in pytree.tree_leaves(value) if type(n) is int)


def points_for(
    smallest: Point,
    largest: Point,
    bounds: Sequence[int],
    *,
    tight: bool = False,
    avoided: Collection[int] = (),
    refused: Collection[int] = (),
) -> Points | None:
    """Where to compile code for sizes between these and many others.

    Args:
        smallest: the least size of each symbol that calls had.
        largest: the greatest.
        bounds: what no size may exceed.
        tight: do not go far below the smallest sizes.
        avoided: numbers that no size may be, except a least size where others are larger, or 2.
        refused: numbers that no size may be, except a least size of 2.

    Returns:
        None: there are no such sizes.
    """
    taken = {*avoided, *refused}
    used = set(refused)
    most, middle, least = [], [], []
    for low, high, bound in zip(smallest, largest, bounds, strict=True):
        # Two symbols may be 2 at once: at the other points they differ.
        bottom = low if low == LEAST_SIZE else _smallest(low, taken, used, tight)
        if bottom is None:
            return None
        taken.add(bottom)
        least.append(bottom)
        top = _largest(min(_FAR * max(high, _LANES), bound), taken, high, bottom)
        common = min(max(high, 2 * _LEAST[-1]), bound)
        between = _prime_below(common, taken, least[-1], 4, 3)
        between = between or _prime_below(common, taken, least[-1])
        if top is None or between is None:
            return None
        most.append(top)
        middle.append(between)
        used.update((bottom, top, between))
    points = Points(tuple(least), tuple(most), tuple(middle), _corners(least, most))
    return points if len(set(points.all)) == len(points.all) else None


def _corners(least: Sequence[int], most: Sequence[int]) -> tuple[Point, ...]:
    """With several symbols, those corners where one of them is large."""
    if len(least) == 1:
        return ()
    return tuple((*least[:i], most[i], *least[i + 1 :]) for i in range(len(least) - 1))


def _smallest(size: int, taken: set[int], used: set[int], tight: bool) -> int | None:
    """As :func:`_small`: one not in ``taken``, unless it is 2, or larger than one not in ``used``.

    Code for a larger size serves fewer calls, and 2 is the number of many other things.
    """
    generic, usual = (_small(size, set(each), tight) for each in (taken, used))
    return generic if generic and usual and LEAST_SIZE < generic <= usual else usual


def _small(size: int, taken: set[int], tight: bool) -> int | None:
    """A size well below one that calls had, if there is one: the next may be smaller."""
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
    """The greatest size up to ``limit`` that differs from ``bottom``, the smallest one, by what no
    small number divides.

    A remainder of a size is then another at some point: what TVM has computed of it in numbers, and
    left out of an expression, is noticed. It is a prime or twice one.
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

    A prime one below a power of two is left out: a size plus one, as caches have, would be that
    power there, which is a number of lanes or of tiles elsewhere.
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
