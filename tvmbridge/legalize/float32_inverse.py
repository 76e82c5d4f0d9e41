"""More functions of float32 that LLVM can vectorize: log1p, expm1, cosh, asin, asinh and others.

The functions call functions of :mod:`tvmbridge.legalize.float32`. The coefficients are minimax fits
of the relative error (Lawson's iteration on Chebyshev nodes, rounded to float32).
"""

from __future__ import annotations

import math

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.legalize.float32 import (
    absolute,
    bits,
    copy_sign,
    exp,
    from_bits,
    is_nan,
    log,
    reduce_exponent,
)
from tvmbridge.legalize.lets import Lets, constant, horner

# atan x = x + x z P(z) for z = x^2, x <= tan(pi / 8), to 3e-9
_ATAN = (-0.33333316, 0.19998489, -0.14243849, 0.10595998, -0.06083446)
# asin x = x + x z P(z) for z = x^2, x <= 1/2, to 1e-9
_ASIN = (0.1666666, 0.07500511, 0.04451572, 0.03181761, 0.01440261, 0.03756519)

_INFINITY = 0x7F800000


def _f32(value: float) -> Expr:
    return constant(value, "float32")


def _kept(value: Expr) -> Expr:
    """Return ``value``, reinterpreted twice: TVM would simplify (1 + x) - 1 to x."""
    return from_bits(bits(value))


def log1p(x: Expr) -> Expr:
    """Return log(1 + x), with an error below 3 ulp.

    It is ``log(u) * x / (u - 1)`` with the rounded ``u = 1 + x``, which corrects the rounding.
    """
    lets = Lets()
    x = lets.bind(x, "x")
    u = lets.bind(_kept(_f32(1.0) + x), "u")
    difference = lets.bind(u - _f32(1.0), "difference")
    exact = tirx.Or(difference.equal(_f32(0.0)), x > _f32(1e30))
    divisor = lets.bind(tirx.Select(exact, _f32(1.0), difference), "divisor")
    logarithm = lets.bind(log(u), "logarithm")
    corrected = lets.bind(logarithm * (tirx.Select(exact, _f32(1.0), x) / divisor), "corrected")
    return lets.close(tirx.Select(difference.equal(_f32(0.0)), x, corrected))


def expm1(x: Expr) -> Expr:
    """Return e^x - 1, with an error below 2 ulp, and full relative precision near 0."""
    lets = Lets()
    x = lets.bind(x, "x")
    low = lets.bind(tirx.Select(x < _f32(-20.0), _f32(-20.0), x), "low")
    cut = lets.bind(tirx.Select(low > _f32(89.0), _f32(89.0), low), "cut")
    n, rest = reduce_exponent(lets, cut)
    # 2^128 is no float32: half of the result is computed, and doubled.
    scale = lets.bind(from_bits((n + constant(126, "int32")) << constant(23, "int32")), "scale")
    halved = lets.bind(rest * scale + (scale - _f32(0.5)), "halved")
    value = lets.bind(halved + halved, "value")
    large = x > _f32(88.72283172607422)
    result = tirx.Select(large, from_bits(constant(_INFINITY, "int32")), value)
    return lets.close(tirx.Select(absolute(x) < _f32(1e-8), x, result))


def cosh(x: Expr) -> Expr:
    """Return cosh x = (e^|x| + e^-|x|) / 2.

    It multiplies by e^(|x| / 2) twice, because e^|x| may overflow although the result does not.
    """
    lets = Lets()
    e = lets.bind(exp(absolute(x) * _f32(0.5)), "e")
    return lets.close((_f32(0.5) * e) * e + (_f32(0.5) / e) / e)


def asinh(x: Expr) -> Expr:
    """Return asinh x = sign(x) log(|x| + sqrt(x^2 + 1)), by log1p."""
    lets = Lets()
    x = lets.bind(x, "x")
    a = lets.bind(absolute(x), "a")
    large = a > _f32(1e9)
    cut = lets.bind(tirx.Select(large, _f32(0.0), a), "cut")
    square = lets.bind(cut * cut, "square")
    small = log1p(cut + square / (_f32(1.0) + tirx.sqrt(square + _f32(1.0))))
    size = lets.bind(tirx.Select(large, log(a) + _f32(math.log(2.0)), small), "size")
    return lets.close(tirx.Select(is_nan(x), x, copy_sign(size, x)))


def acosh(x: Expr) -> Expr:
    """Return acosh x = log(x + sqrt(x^2 - 1)), by log1p; NaN below 1."""
    lets = Lets()
    x = lets.bind(x, "x")
    large = x > _f32(1e9)
    t = lets.bind(tirx.Select(large, _f32(0.0), _kept(x - _f32(1.0))), "t")
    small = log1p(t + tirx.sqrt(t) * tirx.sqrt(t + _f32(2.0)))
    return lets.close(tirx.Select(large, log(x) + _f32(math.log(2.0)), small))


def atanh(x: Expr) -> Expr:
    """Return atanh x = log((1 + x) / (1 - x)) / 2, by log1p."""
    lets = Lets()
    x = lets.bind(x, "x")
    a = lets.bind(absolute(x), "a")
    size = lets.bind(_f32(0.5) * log1p((a + a) / (_f32(1.0) - a)), "size")
    return lets.close(tirx.Select(is_nan(size), size, copy_sign(size, x)))


def _asin_within_half(lets: Lets, x: Expr) -> tuple[Expr, Expr]:
    """Return ``far``, whether |x| > 1/2, and ``small``, an arcsine of an argument of at most 1/2.

    ``small`` is asin |x|, or asin(sqrt((1 - |x|) / 2)) if ``far``; NaN for |x| > 1. The callers use
    asin x = pi/2 - 2 asin(sqrt((1 - x) / 2)).
    """
    a = lets.bind(absolute(x), "a")
    far = a > _f32(0.5)
    root = tirx.sqrt((_f32(1.0) - a) * _f32(0.5))
    argument = lets.bind(tirx.Select(far, root, a), "argument")
    square = lets.bind(argument * argument, "square")
    small = argument + argument * (square * horner(square, _ASIN))
    return far, lets.bind(small, "small")


def asin(x: Expr) -> Expr:
    """Return asin x, for |x| > 1/2 by pi/2 - 2 asin(sqrt((1 - |x|) / 2)); NaN for |x| > 1."""
    lets = Lets()
    x = lets.bind(x, "x")
    far, small = _asin_within_half(lets, x)
    size = tirx.Select(far, _f32(math.pi / 2) - (small + small), small)
    size = lets.bind(size, "size")
    return lets.close(tirx.Select(is_nan(size), size, copy_sign(size, x)))


def acos(x: Expr) -> Expr:
    """Return acos x; NaN for |x| > 1.

    For |x| > 1/2 it is 2 asin(sqrt((1 - |x|) / 2)), or pi minus that if x is negative.
    """
    lets = Lets()
    x = lets.bind(x, "x")
    far, small = _asin_within_half(lets, x)
    twice = lets.bind(small + small, "twice")
    end = tirx.Select(x < _f32(0.0), _f32(math.pi) - twice, twice)
    signed = tirx.Select(x < _f32(0.0), _f32(math.pi / 2) + small, _f32(math.pi / 2) - small)
    return lets.close(tirx.Select(far, end, signed))


def _atan_of_unit(lets: Lets, a: Expr) -> Expr:
    """Return atan a for ``0 <= a <= 1``.

    Above tan(pi / 8) it is pi/4 + atan((a - 1) / (a + 1)).
    """
    far = a > _f32(math.tan(math.pi / 8))
    turned = (a - _f32(1.0)) / (a + _f32(1.0))
    t = lets.bind(tirx.Select(far, turned, a), "t")
    square = lets.bind(t * t, "square")
    value = lets.bind(t + t * (square * horner(square, _ATAN)), "value")
    return lets.bind(tirx.Select(far, _f32(math.pi / 4) + value, value), "atan")


def atan(x: Expr) -> Expr:
    """Return atan x, for |x| > 1 by pi/2 - atan(1 / |x|)."""
    lets = Lets()
    x = lets.bind(x, "x")
    a = lets.bind(absolute(x), "a")
    inverse = lets.bind(tirx.Select(a > _f32(1.0), _f32(1.0) / a, a), "inverse")
    value = _atan_of_unit(lets, inverse)
    size = lets.bind(tirx.Select(a > _f32(1.0), _f32(math.pi / 2) - value, value), "size")
    return lets.close(tirx.Select(is_nan(x), x, copy_sign(size, x)))


def atan2(y: Expr, x: Expr) -> Expr:
    """Return the angle of the point (x, y), as IEEE defines it for zeros and infinities too."""
    lets = Lets()
    y, x = lets.bind(y, "y"), lets.bind(x, "x")
    height, width = lets.bind(absolute(y), "height"), lets.bind(absolute(x), "width")
    steep = height > width
    least = lets.bind(tirx.Select(steep, width, height), "least")
    most = lets.bind(tirx.Select(steep, height, width), "most")
    quotient = tirx.Select(most.equal(_f32(0.0)), _f32(0.0), least / most)
    same = tirx.And(least.equal(most), most > _f32(0.0))
    value = _atan_of_unit(lets, lets.bind(tirx.Select(same, _f32(1.0), quotient), "quotient"))
    upright = lets.bind(tirx.Select(steep, _f32(math.pi / 2) - value, value), "upright")
    left = bits(x) < constant(0, "int32")
    angle = lets.bind(tirx.Select(left, _f32(math.pi) - upright, upright), "angle")
    unknown = tirx.Or(is_nan(x), is_nan(y))
    return lets.close(tirx.Select(unknown, x + y, copy_sign(angle, y)))
