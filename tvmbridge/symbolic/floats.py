"""Floating-point numbers in compiled code that depend on sizes, such as the factor of a mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy
from tvm import tirx
from tvm.ir import Expr

from tvmbridge.symbolic.sizes import Size, Sizes

# Functions of a count n, each with its inverse: n itself, the factor 1/n of a mean, n/(n-1) of an
# unbiased variance, and 1/(n-1) of a sum of squares.
_FORMS: tuple[tuple[Callable[[float], float], Callable[[float], float]], ...] = (
    (lambda n: n, lambda v: v),
    (lambda n: 1.0 / n, lambda v: 1.0 / v),
    (lambda n: n / (n - 1.0), lambda v: v / (v - 1.0)),
    (lambda n: 1.0 / (n - 1.0), lambda v: 1.0 / v + 1.0),
)
_EXACT = 1 << 24


def float_of_sizes(
    values: Sequence[float], dtype: str, sizes: Sizes, symbols: Sequence[Expr]
) -> Expr | None:
    """Return an expression of the symbols that gives ``values`` at the points of ``sizes``.

    The expression is computed in float64 and then rounded to ``dtype``. None: no known function of
    a count gives these values.
    """
    if dtype not in ("float32", "float64") or not all(v and numpy.isfinite(v) for v in values):
        return None
    # A literal may have more digits than its dtype can hold.
    values = [float(numpy.dtype(dtype).type(v)) for v in values]
    for number, (form, count_of) in enumerate(_FORMS):
        counts = _counts(values, dtype, form, count_of)
        size = None if counts is None else sizes.find(counts)
        if size is None:
            size = sizes.only(s for s in sizes.known if _fits(s, values, dtype, form, sizes))
        if size is not None:
            return _expression(number, tirx.Cast("float64", size.expression(symbols)))
    return None


def _fits(
    size: Size,
    values: Sequence[float],
    dtype: str,
    form: Callable[[float], float],
    sizes: Sizes,
) -> bool:
    """Whether ``form`` of the count ``size`` gives ``values`` at all points, after rounding."""
    rounded, counts = numpy.dtype(dtype).type, [size.at(p) for p in sizes.points]
    if any(n < 2 for n in counts):
        return False
    return [float(rounded(form(float(n)))) for n in counts] == list(values)


def _counts(
    values: Sequence[float],
    dtype: str,
    form: Callable[[float], float],
    count_of: Callable[[float], float],
) -> tuple[int, ...] | None:
    """Return the counts whose ``form`` rounds to ``values``; None if they are not unique."""
    rounded = numpy.dtype(dtype).type
    found: list[int] = []
    for value in values:
        try:
            # The value is rounded, so its inverse may be off by a few counts.
            near = round(count_of(value))
            reach = min(64, 1 + abs(near) // 1000)
            candidates = [n for n in range(near - reach, near + reach + 1) if n not in (0, 1)]
            fitting = [n for n in candidates if float(rounded(form(float(n)))) == value]
        except (ZeroDivisionError, OverflowError):
            return None
        if len(fitting) != 1 or abs(fitting[0]) > _EXACT:
            return None
        found += fitting
    return tuple(found)


def _expression(form: int, count: Expr) -> Expr:
    one = tirx.FloatImm("float64", 1.0)
    if form == 0:
        return count
    if form == 1:
        return tirx.Div(one, count)
    less = tirx.Sub(count, one)
    return tirx.Div(count if form == 2 else one, less)
