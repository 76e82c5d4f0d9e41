"""Floating-point numbers of compiled code that come from sizes: counts, and quotients of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy
from tvm import tirx
from tvm.ir import Expr

from tvmbridge.symbolic.sizes import Size, Sizes

# A count as it is, the factor of a mean, that of an unbiased variance, that of a sum of squares;
# each with the count that a number of the form is of.
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
    """The float64 expression that, rounded to ``dtype``, has ``values`` at the points of ``sizes``.

    None where there is none of a known form.
    """
    if dtype not in ("float32", "float64") or not all(v and numpy.isfinite(v) for v in values):
        return None
    # A literal may have more digits than its dtype.
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
    """Whether rounding, after which several counts may give one number, leaves ``values``."""
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
    """The integers of which ``values`` are of this form, rounded; None: they are not."""
    rounded = numpy.dtype(dtype).type
    found: list[int] = []
    for value in values:
        try:
            # Of a rounded value the nearest integer may be a neighbour.
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
