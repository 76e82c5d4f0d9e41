"""Floating-point numbers in compiled code that are computed from sizes, such as ``1 / count``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, TypeAlias

import numpy
from tvm import tirx
from tvm.ir import Expr

from tvmbridge.symbolic.size import Point, Size
from tvmbridge.symbolic.sizes import Sizes

# Functions of a count, each with its inverse: the count itself, the factor of a mean, the
# correction of an unbiased variance, the factor of a sum of squares, the distance of two corners.
_Form: TypeAlias = Callable[[Any], Any]
_FORMS: tuple[tuple[_Form, _Form], ...] = (
    (lambda n: n, lambda v: v),
    (lambda n: 1 / n, lambda v: 1 / v),
    (lambda n: n / (n - 1), lambda v: v / (v - 1)),
    (lambda n: 1 / (n - 1), lambda v: 1 / v + 1),
    (lambda n: n - 1, lambda v: v + 1),
)
_EXACT = 1 << 24
_HALF, _MOST_FACTOR = 0.7, 64


def float_of_sizes(
    values: Sequence[float], dtype: str, sizes: Sizes, symbols: Sequence[Expr]
) -> Expr | None:
    """Return an expression of the symbols with these ``values`` at the points of ``sizes``.

    Returns:
        A float64 expression that equals ``values`` when rounded to ``dtype``; None if no known form
        fits.
    """
    if dtype not in ("float32", "float64") or not all(v and numpy.isfinite(v) for v in values):
        return None
    # A literal may have more digits than its dtype.
    values = [float(numpy.dtype(dtype).type(v)) for v in values]
    for number, (form, count_of) in enumerate(_FORMS):
        counts = _counts(values, dtype, form, count_of)
        size = None if counts is None else sizes.find(counts)
        if size is not None:
            return _expression(number, tirx.Cast("float64", size.expression(symbols)))
    for number, (form, _) in enumerate(_FORMS):
        factors = [(s, _factor(s, values, dtype, form, sizes)) for s in sizes.known]
        fitting = [(s, factor) for s, factor in factors if factor is not None]
        found = sizes.only(fitting, partial(_exact, form))
        if found is not None:
            size, factor = found
            expression = _expression(number, tirx.Cast("float64", size.expression(symbols)))
            return expression if factor == 1 else tirx.Mul(_number(float(factor)), expression)
    return _ratio_of_sizes(values, dtype, sizes, symbols)


def _ratio_of_sizes(
    values: Sequence[float], dtype: str, sizes: Sizes, symbols: Sequence[Expr]
) -> Expr | None:
    """Return a ratio of two sizes, or of two sizes less one, as the steps of interpolations are."""
    rounded = numpy.dtype(dtype).type
    at = {size: [size.at(p) for p in sizes.points] for size in sizes.found}
    for less in (0, 1):
        fitting = [
            (a, b)
            for a, b in itertools.permutations(at, 2)
            if min(at[b]) > less
            and all(
                float(rounded((x - less) / (y - less))) == v
                for x, y, v in zip(at[a], at[b], values, strict=True)
            )
        ]
        found = sizes.only(fitting, partial(_exact_ratio, less))
        if found is not None:
            above, below = (
                tirx.Cast("float64", tirx.Sub(n.expression(symbols), tirx.IntImm("int64", less)))
                for n in found
            )
            return tirx.Div(above, below)
    return None


def _exact_ratio(less: int, of: tuple[Size, Size], point: Point) -> Fraction | None:
    above, below = (size.at(point) - less for size in of)
    return Fraction(above, below) if below > 0 else None


def _exact(form: _Form, of: tuple[Size, Fraction], point: Point) -> Fraction | None:
    size, factor = of
    count = Fraction(size.at(point))
    return factor * form(count) if count > 1 else None


def _factor(
    size: Size, values: Sequence[float], dtype: str, form: _Form, sizes: Sizes
) -> Fraction | None:
    """Return the factor, an integer or its reciprocal, of ``form(size)`` that gives ``values``.

    The gradient of a variance has the factor 2. None: there is no such factor.
    """
    counts = [size.at(p) for p in sizes.points]
    if any(n < 2 for n in counts):
        return None
    rounded, forms = numpy.dtype(dtype).type, [form(float(n)) for n in counts]
    ratio = values[0] / forms[0]
    factor = Fraction(round(ratio)) if abs(ratio) > _HALF else Fraction(1, round(1.0 / ratio))
    if not 1 / _MOST_FACTOR <= abs(factor) <= _MOST_FACTOR:
        return None
    fits = [float(rounded(float(factor) * each)) for each in forms] == list(values)
    return factor if fits else None


def _counts(
    values: Sequence[float],
    dtype: str,
    form: _Form,
    count_of: _Form,
) -> tuple[int, ...] | None:
    """Return the integers whose ``form``, rounded, equals ``values``; None if any is not unique."""
    rounded = numpy.dtype(dtype).type
    found: list[int] = []
    singular = [n for n in (0, 1) if not _is_defined(form, n)]
    for value in values:
        try:
            # Since the value is rounded, the count may be an integer near the computed one.
            near = round(count_of(value))
            reach = min(64, 1 + abs(near) // 1000)
            candidates = [n for n in range(near - reach, near + reach + 1) if n not in singular]
            fitting = [n for n in candidates if float(rounded(form(float(n)))) == value]
        except (ZeroDivisionError, OverflowError):
            return None
        if len(fitting) != 1 or abs(fitting[0]) > _EXACT:
            return None
        found += fitting
    return tuple(found)


def _is_defined(form: _Form, count: int) -> bool:
    try:
        form(float(count))
    except ZeroDivisionError:
        return False
    return True


def _expression(form: int, count: Expr) -> Expr:
    one = _number(1.0)
    if form == 0:
        return count
    if form == 1:
        return tirx.Div(one, count)
    less = tirx.Sub(count, one)
    if form == 4:
        return less
    return tirx.Div(count if form == 2 else one, less)


def _number(value: float) -> Expr:
    return tirx.FloatImm("float64", value)
