"""Probes: which dimensions are symbols, where a module is compiled, and arguments of these sizes.

Sizes of probes are primes, or twice a prime, so that nothing divides them and no two dimensions
agree by accident. The smallest and the largest differ by what no small number divides: remainders
of them differ too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch

from tvmbridge.core.errors import CaptureError
from tvmbridge.core.torch_private import pytree
from tvmbridge.graph_capture.any_size import shapes_of
from tvmbridge.graph_capture.relations import Relations
from tvmbridge.graph_capture.trace.arguments import Arguments
from tvmbridge.symbolic.code import Points
from tvmbridge.symbolic.sizes import Point

# A dimension of an argument: the number of its leaf, and of the dimension.
Dimension: TypeAlias = tuple[int, int]
Shapes: TypeAlias = Sequence[tuple[int, tuple[int, ...]]]

_LANES = 64
# Code is for sizes so many times those that calls had.
_FAR = 8
# The smallest sizes that code may be for: 0 and 1 mean something else to broadcasting, and 2 is
# also the number of many other things.
_LEAST = (3, 5, 7, 11, 17)
LEAST_SIZE = 2
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


class Form(NamedTuple):
    """A size that is ``scale`` times a symbol, and ``offset``."""

    scale: int = 1
    offset: int = 0

    def size(self, symbol: int) -> int:
        """The size where the symbol is this number."""
        return self.scale * symbol + self.offset

    def symbol(self, size: int) -> int | None:
        """The symbol of a size; None: no symbol has it."""
        symbol, rest = divmod(size - self.offset, self.scale)
        return None if rest else symbol


_ITSELF = Form()


@dataclass(frozen=True)
class Symbols:
    """The symbolic dimensions: the sizes of each symbol's are found from one number at every call.

    Args:
        dimensions: of each symbol.
        forms: of dimensions whose size is not the symbol itself.
    """

    dimensions: tuple[tuple[Dimension, ...], ...]
    forms: Mapping[Dimension, Form] = field(default_factory=dict)

    @classmethod
    def of(cls, *calls: Shapes) -> Symbols | None:
        """Those of dimensions that are not of one size in all calls; None: the ranks differ.

        Dimensions that are of the same size in each call are one symbol.
        """
        sizes: dict[tuple[int, ...], list[Dimension]] = {}
        for arguments in zip(*calls, strict=True):
            if len({len(shape) for _, shape in arguments}) > 1:
                return None
            leaf = arguments[0][0]
            for number, seen in enumerate(zip(*(shape for _, shape in arguments), strict=True)):
                if len(set(seen)) > 1:
                    sizes.setdefault(seen, []).append((leaf, number))
        return cls(tuple(map(tuple, sizes.values())))

    def with_rows(self, shapes: Shapes) -> Symbols | None:
        """These, and one for the first dimensions of all arguments, which seem to be the rows of a
        batch, since they have one size; None: they do not, or are among these."""
        first = {(leaf, 0): shape[0] for leaf, shape in shapes if shape}
        known = {d for group in self.dimensions for d in group}
        rows = set(first.values())
        if len(rows) != 1 or min(rows) < _LEAST[0] or known & first.keys():
            return None
        return Symbols((tuple(first), *self.dimensions))

    def point(self, leaves: Sequence[Any]) -> Point | None:
        """The sizes of the symbols in a call; None: those of one differ, or are 0 or 1."""
        found = self.sizes(leaves)
        return None if found is None or min(found) < LEAST_SIZE else found

    def sizes(self, leaves: Sequence[Any]) -> Point | None:
        """As :meth:`point`, with sizes of 1; None: those of one symbol differ, or are 0."""
        shapes = {i: leaf.shape for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        found: list[int] = []
        for dimensions in self.dimensions:
            numbers = {self.form(d).symbol(shapes[d[0]][d[1]]) for d in dimensions}
            number = numbers.pop()
            if numbers or number is None or number < 1:
                return None
            found.append(number)
        return tuple(found)

    def form(self, dimension: Dimension) -> Form:
        """How a size is found from its symbol."""
        return self.forms.get(dimension, _ITSELF)

    def where(self, chosen: Sequence[bool]) -> Symbols:
        """Those of these symbols that are chosen."""
        return replace(self, dimensions=tuple(itertools.compress(self.dimensions, chosen)))

    def are_all(self, sample: Shapes, leaves: Sequence[Any]) -> bool:
        """Whether a call differs from a sample in the sizes of symbols alone."""
        symbolic = {d for dimensions in self.dimensions for d in dimensions}
        return all(
            len(shape) == leaves[i].dim()
            and all(
                (i, d) in symbolic or size == leaves[i].shape[d] for d, size in enumerate(shape)
            )
            for i, shape in sample
        )

    def point_of(self, shapes: Mapping[int, Sequence[int]]) -> Point:
        """The sizes of the symbols in a call with these shapes, which they were found in."""
        first = (dimensions[0] for dimensions in self.dimensions)
        return tuple(
            (shapes[d[0]][d[1]] - self.form(d).offset) // self.form(d).scale for d in first
        )

    def apart(self, shapes: Mapping[int, Sequence[int]]) -> Point:
        """The sizes of a call, all different: of equal ones torch.export would make one symbol."""
        taken: list[int] = []
        for size in self.point_of(shapes):
            while size in taken:
                size += 1
            taken.append(size)
        return tuple(taken)

    def probe(self, args: Any, kwargs: Any, point: Point) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments as those given whose symbolic dimensions have the sizes of ``point``."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        shapes = {i: list(t.shape) for i, t in enumerate(leaves) if isinstance(t, torch.Tensor)}
        for dimensions, symbol in zip(self.dimensions, point, strict=True):
            for leaf, number in dimensions:
                shapes[leaf][number] = self.form((leaf, number)).size(symbol)
        made = [_resized(leaf, shapes.get(i)) for i, leaf in enumerate(leaves)]
        found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(made, spec)
        return found


def _resized(leaf: Any, shape: list[int] | None) -> Any:
    """A tensor like ``leaf`` with this shape; nothing is read of its elements."""
    if shape is None or list(leaf.shape) == shape:
        return leaf
    made = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
    return made.requires_grad_(leaf.requires_grad)


def points_within(
    relations: Relations,
    symbols: Symbols,
    sample: Arguments,
    smallest: Sequence[Point],
    largest: Point,
    names: Sequence[str],
) -> Points:
    """Where to compile code, such that all that forward takes for granted of sizes holds there.

    Args:
        relations: what that is.
        symbols: the symbolic dimensions.
        sample: arguments of some size.
        smallest: as of :func:`points_for`; of several the first that can be.
        largest: as of :func:`points_for`.
        names: what messages call the leaves of the arguments.

    Raises:
        DemandedSizeError: forward demands one size.
        CaptureError: it goes another way at others.
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
    """What the symbol of a dimension may not exceed, by forward, or since a call had ``largest``."""
    scale, offset = symbols.form(dimension)
    most = (relations.most(*dimension) - offset) // scale
    return most if scale == 1 else min(most, _FAR * max(largest, -(-_LANES // scale)))


def points_for(
    smallest: Point, largest: Point, bounds: Sequence[int], *, tight: bool = False
) -> Points | None:
    """Where to compile code for sizes between these and many others.

    Args:
        smallest: the least size of each symbol that calls had.
        largest: the greatest.
        bounds: what no size may exceed.
        tight: do not go far below the smallest sizes.

    Returns:
        None: there are no such sizes.
    """
    taken: set[int] = set()
    most, middle, least = [], [], []
    for low, high, bound in zip(smallest, largest, bounds, strict=True):
        # Two symbols may be 2 at once: at the other points they differ.
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
    """With several symbols, those corners where one of them is large."""
    if len(least) == 1:
        return ()
    return tuple((*least[:i], most[i], *least[i + 1 :]) for i in range(len(least) - 1))


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
