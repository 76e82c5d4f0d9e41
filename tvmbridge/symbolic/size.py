"""An integer of compiled code as a function of the symbols, and which functions points confuse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.kernels.sized import Fields, value_of

Point: TypeAlias = tuple[int, ...]

# How far from a point two functions of the symbols are compared, at most.
_MOST_NEAR = 1 << 10


@dataclass(frozen=True)
class Size:
    """An integer as a function of the symbols: a polynomial, or its quotient or remainder.

    - ``terms``: the terms of the polynomial: a coefficient, and the powers of each symbol and then
      of each atom.
    - ``divisor``: the integer that the polynomial is divided by, rounding down; 1: no division.
    - ``remainder``: whether the value is the remainder of that division and not the quotient.
    - ``atoms``: quotients of symbols that are factors in the terms, like further symbols.
    """

    terms: tuple[tuple[int, tuple[int, ...]], ...]
    divisor: int = 1
    remainder: bool = False
    atoms: tuple[Size, ...] = ()

    @property
    def atom_fields(self) -> list[Fields]:
        """The atoms in the form that :func:`.value_of` takes."""
        return [(a.terms, a.divisor, a.remainder) for a in self.atoms]

    def times(self, other: Size) -> Size:
        """Return the product with ``other``; both must be polynomials."""
        assert self.divisor == other.divisor == 1
        symbols = len(self.terms[0][1]) - len(self.atoms)
        atoms = tuple(dict.fromkeys((*self.atoms, *other.atoms)))
        found: dict[tuple[int, ...], int] = {}
        for (a, one), (b, two) in itertools.product(self.terms, other.terms):
            powers = [x + y for x, y in zip(one[:symbols], two[:symbols], strict=True)]
            for atom in atoms:
                powers.append(
                    sum(
                        of[symbols + each.atoms.index(atom)]
                        for each, of in ((self, one), (other, two))
                        if atom in each.atoms
                    )
                )
            found[tuple(powers)] = found.get(tuple(powers), 0) + a * b
        return Size(tuple((n, powers) for powers, n in found.items() if n), atoms=atoms)

    def at(self, point: Sequence[int]) -> int:
        """Return the value at ``point``."""
        return value_of(self.terms, self.divisor, self.remainder, point, self.atom_fields)

    def expression(self, symbols: Sequence[Expr]) -> Expr:
        """Return the size as a TVM expression of ``symbols``."""
        symbols = [*symbols, *(atom.expression(symbols) for atom in self.atoms)]
        total: Expr | None = None
        for coefficient, powers in self.terms:
            factors = [s for s, power in zip(symbols, powers, strict=True) for _ in range(power)]
            if coefficient != 1 or not factors:
                factors.append(tirx.IntImm("int64", coefficient))
            term = factors[0]
            for factor in factors[1:]:
                term = term * factor
            total = term if total is None else total + term
        assert total is not None
        if self.divisor == 1:
            return total
        divisor = tirx.IntImm("int64", self.divisor)
        return tirx.FloorMod(total, divisor) if self.remainder else tirx.FloorDiv(total, divisor)


def alike(sizes: Sequence[Size], points: Sequence[Point]) -> list[tuple[Size, Point]]:
    """Return the sizes that agree with an earlier one at ``points``, and a point where they differ.

    ``(s + 1) // 3`` and ``s // 3`` agree at all multiples of 3. Sizes that agree near the points as
    well, as ``(s - 1) // 2 + 1`` and ``(s + 1) // 2`` do, are the same function. So are sizes that
    differ beyond the range of one symbol alone: ``(s + 4) % 32`` and ``s + 4`` for ``s`` below 28.
    """
    return list(_confused(sizes, points, tuple))


def proportional(sizes: Sequence[Size], points: Sequence[Point]) -> list[tuple[Size, Point]]:
    """Like :func:`alike`, but for sizes of which one is ``a * other + b`` at ``points``.

    ``(s + 3) // 4`` is ``2 * ((s + 7) // 8) - 1`` wherever it is odd. Where it has a border, code
    has a number that is a function of either.
    """
    quotients = dict.fromkeys(q for s in sizes for q in (s, *s.atoms) if q.divisor > 1)
    return list(_confused([q for q in quotients if not q.remainder], points, _slopes))


def _confused(
    sizes: Sequence[Size],
    points: Sequence[Point],
    form: Callable[[Iterable[int]], tuple[int, ...]],
) -> Iterable[tuple[Size, Point]]:
    """Yield sizes whose values at ``points`` have the form of those of an earlier size."""
    first: dict[tuple[int, ...], tuple[Size, list[int]]] = {}
    for size in sizes:
        values = [size.at(p) for p in points]
        other, known = first.setdefault(form(values), (size, values))
        if other != size:
            divisors = [q.divisor for s in (size, other) for q in (s, *s.atoms)]
            for near in (p for p in _near(points[0], divisors) if _is_served(points, p)):
                if form([*values, size.at(near)]) != form([*known, other.at(near)]):
                    yield size, near
                    break


def _slopes(values: Iterable[int]) -> tuple[int, ...]:
    """Return what ``values`` have in common with all ``a * v + b``, for ``a`` above 0."""
    start, *rest = values
    factor = math.gcd(*(v - start for v in rest))
    return tuple((v - start) // (factor or 1) for v in rest)


def _is_served(points: Sequence[Point], point: Point) -> bool:
    """Whether code may serve ``point``; of several symbols too few points are compared to say no.

    Code for sizes from 2 on may serve 1 too.
    """
    return len(point) > 1 or min(points)[0] - 1 <= point[0] <= max(points)[0]


def _near(point: Point, divisors: Iterable[int]) -> Iterable[Point]:
    """Yield points in each direction from ``point``, until remainders by ``divisors`` repeat."""
    reach = min(math.lcm(*divisors), _MOST_NEAR)
    for away in (n for distance in range(1, reach + 1) for n in (distance, -distance)):
        for i, size in enumerate(point):
            yield (*point[:i], size + away, *point[i + 1 :])
        yield tuple(size + away for size in point)
