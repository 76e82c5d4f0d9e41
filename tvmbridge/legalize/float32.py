"""Elementary functions of float32 that LLVM can vectorize: polynomials, no calls.

Every function takes and returns a scalar float32 expression. The coefficients are minimax fits
(Lawson's iteration on Chebyshev nodes, computed with 120 bits, rounded to float32); argument
reductions are the usual ones of Cody and Waite. A multiplication followed by an addition may be
fused or not: both are within the stated error.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.legalize.lets import Lets, constant, horner

_LOG2_E = 1.4426950408889634
# ln 2 in two parts; the first has so few bits that its product with an exponent is exact.
_LN2_HIGH = 0.693145751953125
_LN2_LOW = 1.428606765330187e-06
# 1.5 * 2^23: adding it rounds a small float to an integer held in its low bits.
_ROUND = 12582912.0
_ROUND_BITS = 0x4B400000

_EXP: tuple[float, ...] = (0.5, 0.1666666567325592, 0.04166629537940025, 0.008333497680723667)
_EXP += (0.0013944758102297783, 0.00019790243823081255)
_LOG: tuple[float, ...] = (
    0.3333331346511841,
    -0.25000008940696716,
    0.2000211924314499,
    -0.1666799634695053,
)
_LOG += (0.14219552278518677, -0.1240558922290802, 0.11888162046670914, -0.11675652116537094)
_LOG += (0.06746640801429749,)
# 2^-s = 1 + s P(s) for |s| <= 1/2
_EXP2: tuple[float, ...] = (
    -0.6931471824645996,
    0.24022647738456726,
    -0.05550331994891167,
    0.00961843878030777,
)
_EXP2 += (-0.0013399003073573112, 0.00015353258640971035)
# erf x = x + x P(x^2) for |x| <= 1; erfc x = 2^-P(x) for 1 <= x <= 4
_ERF_SMALL: tuple[float, ...] = (
    0.12837916612625122,
    -0.3761262595653534,
    0.1128358542919159,
    -0.026853812858462334,
)
_ERF_SMALL += (0.005188327748328447, -0.0008010193705558777, 7.853861461626366e-05)
_ERFC: tuple[float, ...] = (
    0.0004927112022414804,
    1.6260459423065186,
    0.9206483960151672,
    0.1487516164779663,
)
_ERFC += (-0.03150567412376404, 0.004252573475241661, -0.00026888848515227437)
# erfc(x / sqrt 2) = 2^-(x P(x)) for 0 <= x <= 6, to 2e-8
_NORMAL_TAIL: tuple[float, ...] = (1.1511051654815674, 0.4592081904411316, 0.052496179938316345)
_NORMAL_TAIL += (-0.007063423283398151, 0.00013693880464415997, 0.0001861791533883661)
_NORMAL_TAIL += (-3.937744986615144e-05, 2.8348920295684366e-06)
# tanh x = x + x^3 P(x^2) for |x| <= 0.625
_TANH_SMALL: tuple[float, ...] = (-0.3333328068256378, 0.13331441581249237, -0.05373971536755562)
_TANH_SMALL += (0.02063908614218235, -0.005704986862838268)


def _f32(value: float) -> Expr:
    return constant(value, "float32")


def _i32(value: int) -> Expr:
    return constant(value, "int32")


def bits(x: Expr) -> Expr:
    """Return the bit pattern of a float32 as int32."""
    return tirx.reinterpret("int32", x)


def from_bits(x: Expr) -> Expr:
    """Return the float32 with the bit pattern ``x`` (int32)."""
    return tirx.reinterpret("float32", x)


def is_nan(x: Expr) -> Expr:
    """Return whether a float32 is NaN, by its bits: TVM would simplify ``x != x`` to false."""
    return (bits(x) & _i32(0x7FFFFFFF)) > _i32(0x7F800000)


def absolute(x: Expr) -> Expr:
    """Return the absolute value of a float32, by its bits."""
    return from_bits(bits(x) & _i32(0x7FFFFFFF))


def copy_sign(magnitude: Expr, sign: Expr) -> Expr:
    """Return ``magnitude`` (not negative) with the sign of ``sign``."""
    return from_bits(bits(magnitude) | (bits(sign) & _i32(-0x80000000)))


def _power_of_two(n: Expr) -> Expr:
    """Return 2^n for an int32 ``n`` in [-126, 127]."""
    return from_bits((n + _i32(127)) << _i32(23))


def _rounded(lets: Lets, x: Expr) -> tuple[Expr, Expr]:
    """Return x rounded to an integer, and an int32 with that integer in its low bits.

    ``|x|`` must be below 2^22.
    """
    shifted = bits(lets.bind(x + _f32(_ROUND), "shifted"))
    # Reinterpreted twice: TVM would simplify (x + c) - c to x.
    return lets.bind(from_bits(shifted) - _f32(_ROUND), "n"), shifted


def _reduce(lets: Lets, x: Expr) -> tuple[Expr, Expr]:
    """Return n, as int32, and r with ``x = n ln 2 + r`` and ``|r| <= ln 2 / 2``."""
    n, shifted = _rounded(lets, x * _f32(_LOG2_E))
    r = lets.bind(x - n * _f32(_LN2_HIGH) - n * _f32(_LN2_LOW), "r")
    return lets.bind(shifted - _i32(_ROUND_BITS), "k"), r


# The largest float32 whose exponential is a finite float32.
_EXP_LARGEST = 88.72283172607422


def exp(x: Expr) -> Expr:
    """Return e^x, with an error below 1 ulp, also for denormal results; NaN for NaN."""
    lets = Lets()
    x = lets.bind(x, "x")
    low = lets.bind(tirx.Select(x < _f32(-104.0), _f32(-104.0), x), "low")
    clamped = lets.bind(tirx.Select(low > _f32(89.0), _f32(89.0), low), "clamped")
    n, r = _reduce(lets, clamped)
    p = lets.bind(r + r * r * horner(r, _EXP) + _f32(1.0), "p")
    # In two steps: 2^128 and 2^-150 are no float32, but their products with p may be.
    halved = lets.bind(n >> _i32(1), "halved")
    value = lets.bind(p * _power_of_two(halved) * _power_of_two(n - halved), "value")
    # Infinity explicitly: a product does not overflow if LLVM fuses it with an addition.
    return lets.close(tirx.Select(x > _f32(_EXP_LARGEST), from_bits(_i32(0x7F800000)), value))


def _half_power(lets: Lets, q: Expr) -> Expr:
    """Return 2^-q for ``0 <= q <= 120`` or NaN; the relative error adds 1e-7 to that of ``q``."""
    n, shifted = _rounded(lets, _f32(0.0) - q)
    s = lets.bind(q + n, "s")
    p = bits(lets.bind(_f32(1.0) + s * horner(s, _EXP2), "p"))
    # The shift into the exponent keeps only the integer in the low bits of the shifted number.
    return lets.bind(from_bits(p + (shifted << _i32(23))), "power")


def exp_nonpositive(x: Expr) -> Expr:
    """Return e^x for ``x <= 0`` or NaN, with an error below 1 ulp, also for denormal results."""
    lets = Lets()
    x = lets.bind(x, "x")
    # If the result is 0, compute e^0 instead: underflowing products are slow on some processors.
    vanishes = x < _f32(-104.0)
    low = lets.bind(tirx.Select(vanishes, _f32(0.0), x), "low")
    n, r = _reduce(lets, low)
    p = lets.bind(r + r * r * horner(r, _EXP) + _f32(1.0), "p")
    # 2^-150 is no float32: multiply by 2^(n + 24), then by 2^-24, which rounds denormals once.
    value = lets.bind(p * from_bits((n + _i32(151)) << _i32(23)) * _f32(2.0**-24), "value")
    return lets.close(tirx.Select(vanishes, _f32(0.0), value))


def reduce_exponent(lets: Lets, x: Expr) -> tuple[Expr, Expr]:
    """Return n, as int32, and e^r - 1 with ``x = n ln 2 + r`` and ``|r| <= ln 2 / 2``."""
    n, r = _reduce(lets, x)
    return n, lets.bind(r + r * r * horner(r, _EXP), "p")


def expm1_nonnegative(lets: Lets, x: Expr) -> Expr:
    """Return e^x - 1 for ``0 <= x <= 80``, with full relative precision near 0."""
    n, p = reduce_exponent(lets, x)
    scale = lets.bind(_power_of_two(n), "scale")
    return lets.bind(p * scale + (scale - _f32(1.0)), "expm1")


def tanh(x: Expr) -> Expr:
    """Return tanh x, with an error below 2 ulp.

    Near 0 it is a polynomial, otherwise ``t / (t + 2)`` with ``t = e^(2|x|) - 1``.
    """
    lets = Lets()
    x = lets.bind(x, "x")
    a = lets.bind(absolute(x), "a")
    square = lets.bind(a * a, "square")
    small = lets.bind(a + a * (square * horner(square, _TANH_SMALL)), "small")
    doubled = lets.bind(tirx.Select(a > _f32(10.0), _f32(20.0), a + a), "doubled")
    t = expm1_nonnegative(lets, doubled)
    size = lets.bind(tirx.Select(a < _f32(0.625), small, t / (t + _f32(2.0))), "size")
    return lets.close(copy_sign(size, x))


def log(x: Expr) -> Expr:
    """Return the natural logarithm, with an error below 1 ulp, also for denormals; -inf for 0."""
    lets = Lets()
    x = lets.bind(x, "x")
    tiny = x < _f32(1.1754943508222875e-38)
    scaled = lets.bind(tirx.Select(tiny, x * _f32(8388608.0), x), "scaled")
    # The exponent is chosen so that the mantissa is in [sqrt(1/2), sqrt(2)).
    shifted = lets.bind(bits(scaled) - _i32(0x3F3504F3), "shifted")
    mantissa = from_bits((shifted & _i32(0x7FFFFF)) + _i32(0x3F3504F3))
    f = lets.bind(mantissa - _f32(1.0), "f")
    exponent = tirx.Cast("float32", shifted >> _i32(23))
    e = lets.bind(exponent - tirx.Select(tiny, _f32(23.0), _f32(0.0)), "e")
    square = lets.bind(f * f, "square")
    tail = lets.bind(e * _f32(_LN2_LOW) + f * square * horner(f, _LOG), "tail")
    finite = lets.bind(e * _f32(_LN2_HIGH) + (f + (tail - square * _f32(0.5))), "finite")
    infinity = from_bits(_i32(0x7F800000))
    positive = tirx.Select(x > _f32(3.4028234663852886e38), infinity, finite)
    at_zero = tirx.Select(
        (bits(x) & _i32(0x7FFFFFFF)).equal(_i32(0)), from_bits(_i32(-0x800000)), positive
    )
    negative = lets.bind(tirx.Select(x < _f32(0.0), from_bits(_i32(0x7FC00000)), at_zero), "value")
    return lets.close(tirx.Select(is_nan(x), x, negative))


def erf(x: Expr) -> Expr:
    """Return erf x, with an error below 2 ulp; NaN for NaN.

    For ``|x| < 1`` it is ``x + x P(x^2)``, otherwise ``1 - 2^-Q(|x|)`` with the sign of x.
    """
    lets = Lets()
    x = lets.bind(x, "x")
    a = lets.bind(absolute(x), "a")
    square = lets.bind(x * x, "square")
    small = lets.bind(x + x * horner(square, _ERF_SMALL), "small")
    cut = lets.bind(tirx.Select(a > _f32(4.0), _f32(4.0), a), "cut")
    decay = _half_power(lets, lets.bind(horner(cut, _ERFC), "q"))
    large = copy_sign(_f32(1.0) - decay, x)
    return lets.close(tirx.Select(a < _f32(1.0), small, large))


def gelu(x: Expr) -> Expr:
    """Return GELU, x Phi(x), as max(x, 0) - |x| / 2 * erfc(|x| / sqrt 2).

    In this form no digits cancel for negative x. The error is below 1e-7 |x|. For x below -6 the
    result is 0, as its absolute value is below 6e-9. It is NaN for NaN and, as in PyTorch's kernel,
    for infinities.
    """
    lets = Lets()
    x = lets.bind(x, "x")
    a = lets.bind(absolute(x), "a")
    cut = lets.bind(tirx.Select(a > _f32(6.0), _f32(6.0), a), "cut")
    tail = _half_power(lets, lets.bind(cut * horner(cut, _NORMAL_TAIL), "q"))
    weight = lets.bind(tirx.Select(a > _f32(6.0), _f32(0.0), _f32(0.5) * tail), "weight")
    lost = lets.bind(a * weight, "lost")
    return lets.close(tirx.Select(x < _f32(0.0), _f32(0.0), x) - lost)
