"""Find integers in compiled code as functions of the symbols, from their values at a few points.

A *point* is one integer for each symbol. Compiling a module at several points gives the same code
with other numbers in it. Each such number is assumed to be a polynomial of the symbols, or a
quotient or remainder of a polynomial. Its values at the points decide which; if several functions
fit, there is no result. A quotient of a symbol, such as the extent after a strided window, may be
a factor in other polynomials.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tvmbridge.core.errors import BuildError
from tvmbridge.symbolic.size import Point, Size, alike

_T = TypeVar("_T")

# The greatest power of one symbol in a product of symbols.
_MOST_POWER = 2
# Vector lengths, numbers of threads and of tiles are powers of two.
_DIVISORS = tuple(1 << i for i in range(1, 17))
# Smaller numbers may equal a quotient or remainder by chance.
_LEAST_QUOTIENT = 16
# How many rows or columns padding may add to an image, or a window remove.
_BORDERS = range(-2, 7)
# Wider borders are those of dilated kernels: 7 x 7 with dilation 3 adds 18 to rows and to columns.
_WIDE_BORDERS = range(_BORDERS.stop, 65)
_BORDERS_OF_TWO = (
    *itertools.product(_BORDERS, _BORDERS),
    *(pair for n in _WIDE_BORDERS for pair in ((n, n), (n, 0), (0, n))),
)
# Functions of sizes have up to two unknown numbers, such as a factor and a constant.
_MOST_UNKNOWN = 2


class DifferentCodeError(BuildError):
    """Code for several sizes differs in more than numbers, so it cannot be generalized."""


class Sizes:
    """Finds the function of the symbols (a :class:`Size`) that has given values at ``points``.

    Args:
        points: at least three points. Their numbers should be unusual ones, so that no other number
            in compiled code equals one of them by chance.
        traced: sizes that the code is known to have, such as those of a symbolic trace.
        least: the least values of the symbols that code shall serve; None: those of the last point.
    """

    def __init__(
        self,
        points: Sequence[Point],
        traced: Sequence[Size] = (),
        least: Point | None = None,
    ) -> None:
        self.points = tuple(points)
        self.least = self.points[-1] if least is None else least
        self.traced = tuple(traced)
        self.symbols = len(points[0])
        self._found: dict[tuple[int, ...], Size] = {}
        # Values at the points that several sizes of the trace have.
        self._ambiguous = {tuple(a.at(p) for p in self.points) for a, _ in alike(traced, points)}
        self._atoms: tuple[Size, ...] = ()
        # Sums that were found, each with its values at the points.
        self._sums_found: dict[Size, tuple[int, ...]] = {}
        # Values for which nothing was found, with the numbers of atoms and sums known at that time.
        self._missed: set[tuple[tuple[int, ...], int, int]] = set()
        powers = itertools.product(range(_MOST_POWER + 1), repeat=self.symbols)
        self._monomials = sorted(powers, key=sum)
        self._values = {
            m: tuple(Size(((1, m),)).at(p) for p in self.points) for m in self._monomials
        }
        self._elsewhere = _other_points(self.points)
        for size in self.traced:
            self._enter(size)

    def _enter(self, size: Size) -> None:
        """Add a size of a trace, and its quotients as factors of further sizes."""
        values = tuple(size.at(p) for p in self.points)
        if len(set(values)) > 1 and values not in self._ambiguous:
            self._add(values, self._found.get(values, size))
        quotients = [q for q in (size, *size.atoms) if q.divisor > 1 and not q.remainder]
        self._atoms = tuple(dict.fromkeys((*self._atoms, *quotients)))

    def find(self, values: tuple[int, ...]) -> Size | None:
        """Return the size with these values at the points; None if there is none, or several."""
        sought = values, len(self._atoms), len(self._sums_found)
        if values in self._ambiguous:
            return None
        if values not in self._found and sought not in self._missed:
            size = self._polynomial(values) or self.only(self._of_atoms(values))
            if size is None:
                size = self._product(values)
            if size is None:
                self._missed.add(sought)
            else:
                self._add(values, size)
        return self._found.get(values)

    def find_divided(self, values: tuple[int, ...]) -> Size | None:
        """Like :meth:`find`, but try quotients and remainders of the known polynomials too."""
        known = self.find(values)
        if known is not None or max(values) < _LEAST_QUOTIENT or values in self._ambiguous:
            return known
        whole = self.known
        whole -= {s for s in whole if _begins_last_vector(s, whole)}
        size = self.only(_divided(whole, values, self.points))
        if size is not None:
            self._add(values, size)
            if _is_extent(size):
                self._atoms += (size,)
        return size

    def _add(self, values: tuple[int, ...], size: Size) -> None:
        self._found[values] = size
        if size.divisor == 1 and len(size.terms) > 1:
            self._sums_found[size] = values

    def content(self, values: Sequence[int]) -> int:
        """Return an integer that divides a number of the code at every size.

        ``values`` are the number's values at the sample sizes: (12, 20) of ``4 * n`` gives 4.
        """
        size = self.find(tuple(values))
        if size is None or size.divisor != 1:
            return 1
        return math.gcd(*(coefficient for coefficient, _ in size.terms))

    @property
    def known(self) -> set[Size]:
        """The polynomials found so far."""
        return {s for s in self._found.values() if s.divisor == 1}

    @property
    def found(self) -> set[Size]:
        """All sizes found so far."""
        return set(self._found.values())

    def _polynomial(self, values: tuple[int, ...]) -> Size | None:
        if len(set(values)) == 1:
            return Size(((values[0], (0,) * self.symbols),))
        for monomial in self._monomials:
            coefficient, rest = divmod(values[0], self._values[monomial][0])
            if not rest and all(
                coefficient * m == v for m, v in zip(self._values[monomial], values, strict=True)
            ):
                return Size(((coefficient, monomial),))
        return self.only(itertools.chain(self._of_two_terms(values), self._sums(values)))

    def _of_two_terms(self, values: tuple[int, ...]) -> Iterable[Size]:
        """Yield sums of two terms: of two symbols, or of products of which one divides the other.

        Examples are ``s + 1`` and ``b * s - b``.
        """
        for larger, smaller in itertools.permutations(self._monomials, 2):
            divided = all(a >= b for a, b in zip(larger, smaller, strict=True))
            if not divided and (sum(larger), sum(smaller)) != (1, 1):
                continue
            x, y = self._values[larger], self._values[smaller]
            determinant = x[0] * y[1] - x[1] * y[0]
            if not determinant or _too_few(x, y):
                continue
            first, rest = divmod(values[0] * y[1] - values[1] * y[0], determinant)
            second, other = divmod(x[0] * values[1] - x[1] * values[0], determinant)
            if rest or other:
                continue
            if all(first * a + second * b == v for a, b, v in zip(x, y, values, strict=True)):
                yield Size(((first, larger), (second, smaller)))

    def _sums(self, values: tuple[int, ...]) -> Iterable[Size]:
        """Yield sums of two symbols and a number, as slices of concatenated tensors have them."""
        linear = [m for m in self._monomials if sum(m) == 1]
        for one, other in itertools.combinations(linear, 2):
            of = zip(values, self._values[one], self._values[other], strict=True)
            more, *rest = {v - x - y for v, x, y in of}
            if more and not rest:
                yield Size(((1, one), (1, other), (more, (0,) * self.symbols)))

    def _of_atoms(self, values: tuple[int, ...]) -> Iterable[Size]:
        """Yield products of one or two atoms with symbols, plus a constant that may be negative."""
        for count in (1, 2):
            for atoms in itertools.combinations_with_replacement(self._atoms, count):
                at = [math.prod(a.at(p) for a in atoms) for p in self.points]
                for monomial in self._monomials:
                    at_points = zip(at, self._values[monomial], strict=True)
                    found = _linear(values, [x * m for x, m in at_points])
                    if found is None:
                        continue
                    factor, more = found
                    ones = (1,) * count
                    terms = [(factor, (*monomial, *ones))]
                    if more:
                        terms.append((more, (0,) * (self.symbols + count)))
                    yield Size(tuple(terms), atoms=atoms)

    def _with_borders(self, values: tuple[int, ...]) -> Iterable[Size]:
        """Yield multiples of two extents, each plus a constant: images with borders.

        An extent is a symbol or an atom.
        """
        ones = [m for m in self._monomials if sum(m) == 1]
        extents = [Size(((1, m),)) for m in ones]
        extents += [Size(((1, (*(0,) * self.symbols, 1)),), atoms=(a,)) for a in self._atoms]
        at = [(extent, [extent.at(p) for p in self.points]) for extent in extents]
        for (one, y), (other, x) in itertools.combinations_with_replacement(at, 2):
            for monomial in self._monomials:
                of = self._values[monomial]
                if any(v % m for v, m in zip(values, of, strict=True)) or _too_few(y, x, of):
                    continue
                rest = [v // m for v, m in zip(values, of, strict=True)]
                # With two values, an extent rounded up to a tile may equal one with a border.
                bare = [_too_few(each) for each in (y, x)]
                for i, j in _BORDERS_OF_TWO:
                    first = (y[0] + i) * (x[0] + j)
                    if (i and bare[0]) or (j and bare[1]) or first <= 0 or rest[0] % first:
                        continue
                    factor, of_both = rest[0] // first, zip(rest, y, x, strict=True)
                    if factor > 0 and all(v == factor * (a + i) * (b + j) for v, a, b in of_both):
                        bordered = _plus(one, i).times(_plus(other, j))
                        yield Size(((factor, monomial),)).times(bordered)

    def _product(self, values: tuple[int, ...]) -> Size | None:
        """Return a product of extents with borders, or of known sums; None if several fit.

        A small number may be a product with borders by chance. It must be one of known sums.
        """
        products = list(self._products(values))
        if not products and min(values) < _LEAST_QUOTIENT:
            return None
        return self.only(itertools.chain(self._with_borders(values), products))

    def _products(self, values: tuple[int, ...]) -> Iterable[Size]:
        """Yield products of one or two known sums, a product of symbols, and an integer.

        The strides of attention's scores are an example, for images of ``h * w`` patches and one
        more token: ``2 * (h * w + 1) * (h * w + 1)``.
        """
        dividing = [
            (size, [v // x for v, x in zip(values, at, strict=True)])
            for size, at in self._sums_found.items()
            if min(at) > 1 and not any(v % x for v, x in zip(values, at, strict=True))
        ]
        for size, rest in dividing:
            factor = self._product_of_symbols(rest)
            if factor is not None:
                yield factor.times(size)
        for (size, rest), (other, _) in itertools.combinations_with_replacement(dividing, 2):
            at = self._sums_found[other]
            if any(v % x for v, x in zip(rest, at, strict=True)):
                continue
            factor = self._product_of_symbols([v // x for v, x in zip(rest, at, strict=True)])
            if factor is not None:
                yield factor.times(size).times(other)

    def _product_of_symbols(self, values: Sequence[int]) -> Size | None:
        """Return the multiple of a product of symbols with these values; None if there is none."""
        for monomial, at in self._values.items():
            factor, rest = divmod(values[0], at[0])
            if not rest and all(factor * x == v for x, v in zip(at, values, strict=True)):
                return Size(((factor, monomial),))
        return None

    def only(
        self, candidates: Iterable[_T], at: Callable[[Any, Point], object] = Size.at
    ) -> _T | None:
        """Return a candidate if all candidates are the same function of the symbols, else None."""
        functions = {tuple(at(c, p) for p in self._elsewhere): c for c in candidates}
        return next(iter(functions.values())) if len(functions) == 1 else None


def _plus(size: Size, more: int) -> Size:
    """Return a polynomial plus a constant."""
    zero = (0,) * len(size.terms[0][1])
    return replace(size, terms=(*size.terms, (more, zero))) if more else size


def _linear(values: Sequence[int], of: Sequence[int]) -> tuple[int, int] | None:
    """Return ``(a, b)`` such that ``values = a * of + b`` and ``a > 0``; None if there are none."""
    other = next((i for i, x in enumerate(of) if x != of[0]), None)
    if other is None:
        return None
    factor, rest = divmod(values[other] - values[0], of[other] - of[0])
    more = values[0] - factor * of[0]
    right = all(factor * x + more == v for x, v in zip(of, values, strict=True))
    if rest or factor < 1 or not right or (more and _too_few(of)):
        return None
    return factor, more


def _too_few(*of: Sequence[int]) -> bool:
    """Whether the variables ``of``, by their values at the points, cannot tell two numbers.

    A function of them with two unknown numbers then fits all values, since the variables have
    at most two different values: a quotient of a symbol may be the same at several points.
    """
    return len(set(zip(*of, strict=True))) <= _MOST_UNKNOWN


def _is_extent(size: Size) -> bool:
    """Whether ``size`` is the quotient of one symbol plus at most a constant."""
    first, *rest = (powers for _, powers in size.terms)
    plain = not size.remainder and not size.atoms and sum(first) == 1
    return plain and size.terms[0][0] == 1 and not any(map(any, rest))


def _begins_last_vector(size: Size, whole: Iterable[Size]) -> bool:
    """Whether ``size`` is another size minus the lanes of a vector; such a size has no quotient."""
    if len(size.terms) < 2 or any(size.terms[-1][1]):
        return False
    lanes = -size.terms[-1][0]
    return lanes >= 4 and not lanes & (lanes - 1) and replace(size, terms=size.terms[:-1]) in whole


def _divided(
    whole: Iterable[Size], values: tuple[int, ...], points: Sequence[Point]
) -> Iterable[Size]:
    for size, divisor in itertools.product(whole, _DIVISORS):
        at_points = [size.at(p) for p in points]
        if all(v % divisor == w for v, w in zip(at_points, values, strict=True)):
            yield replace(size, divisor=divisor, remainder=True)
        for more in (0, divisor - 1):  # rounded down, or up
            if all((v + more) // divisor == w for v, w in zip(at_points, values, strict=True)):
                zero = (0,) * len(size.terms[0][1])
                terms = size.terms if not more else (*size.terms, (more, zero))
                yield replace(size, terms=terms, divisor=divisor)


def _other_points(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return ``points`` and further points, between and near them, at which functions differ."""
    between = [
        tuple((3 * a + 2 * b) // 5 + i for i, (a, b) in enumerate(zip(p, q, strict=True)))
        for p, q in itertools.pairwise(points)
    ]
    beside = [tuple(x + k + i for i, x in enumerate(p)) for p in points for k in range(1, 12)]
    return (*points, *between, *beside)
