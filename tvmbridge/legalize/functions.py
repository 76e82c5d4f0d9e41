"""Elementary functions of all floating dtypes.

Functions of float32 are polynomials, half precisions are computed in float32, and float64 calls the
C library. On GPUs, exponentials and tanh of float32 are those of the GPU's own library, as in
PyTorch's kernels: it uses instructions of special function units. ``FUNCTIONS`` maps a name to a
function from a scalar expression of any floating dtype to an expression of the same dtype.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr
from tvm.target import Target

from tvmbridge.legalize import float32, float32_inverse
from tvmbridge.legalize.lets import Lets, constant, dtype_of

ScalarFunction = Callable[[Expr], Expr]

HALF = ("float16", "bfloat16")
FLOATS = (*HALF, "float32", "float64")


def is_nan(x: Expr) -> Expr:
    """Return an expression of whether a value is NaN; false for integers."""
    dtype = dtype_of(x)
    if dtype == "float64":
        bits = tirx.reinterpret("int64", x) & constant(0x7FFFFFFFFFFFFFFF, "int64")
        return bits > constant(0x7FF0000000000000, "int64")
    if dtype in HALF:
        return float32.is_nan(tirx.Cast("float32", x))
    return float32.is_nan(x) if dtype == "float32" else tirx.const(False, "bool")


def libm(name: str) -> ScalarFunction:
    """Return the float64 function ``name`` of the C library."""
    return lambda x: tirx.call_pure_extern("float64", name, x)


def by_dtype(single: ScalarFunction, double: ScalarFunction) -> ScalarFunction:
    """Return a function of all floating dtypes: ``double`` for float64, ``single`` for the others.

    Half precisions are cast to float32 and back.
    """

    def apply(x: Expr) -> Expr:
        dtype = dtype_of(x)
        if dtype in HALF:
            return tirx.Cast(dtype, single(tirx.Cast("float32", x)))
        return double(x) if dtype == "float64" else single(x)

    return apply


def for_target(name: str, formula: ScalarFunction) -> ScalarFunction:
    """Return a float32 function: ``formula``, or on GPUs ``name`` of the library there."""

    def apply(x: Expr) -> Expr:
        target = Target.current(allow_none=True)
        if target is None or "gpu" not in target.keys:
            return formula(x)
        return tirx.call_pure_extern("float32", f"{name}f", x)

    return apply


def _sigmoid(exp: ScalarFunction) -> ScalarFunction:
    """Return the function 1 / (1 + e^-x)."""

    def apply(x: Expr) -> Expr:
        lets, dtype = Lets(), dtype_of(x)
        x = lets.bind(x, "x")
        e = lets.bind(exp(constant(0.0, dtype) - x), "e")
        return lets.close(constant(1.0, dtype) / (constant(1.0, dtype) + e))

    return apply


def _gelu64(x: Expr) -> Expr:
    """Return x Phi(x) = x / 2 (1 + erf(x / sqrt 2))."""
    lets = Lets()
    x, half = lets.bind(x, "x"), constant(0.5, "float64")
    erf = libm("erf")(x * constant(0.5**0.5, "float64"))
    return lets.close(x * half * (constant(1.0, "float64") + erf))


def _gelu_tanh(tanh: ScalarFunction) -> ScalarFunction:
    """Return the function x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""

    def apply(x: Expr) -> Expr:
        lets, dtype = Lets(), dtype_of(x)
        x = lets.bind(x, "x")
        cubic = x + constant(0.044715, dtype) * (x * x * x)
        inner = lets.bind(constant((2.0 / 3.141592653589793) ** 0.5, dtype) * cubic, "inner")
        return lets.close(constant(0.5, dtype) * x * (constant(1.0, dtype) + tanh(inner)))

    return apply


def _silu(exp: ScalarFunction) -> ScalarFunction:
    """Return the function x / (1 + e^-x)."""

    def apply(x: Expr) -> Expr:
        lets, dtype = Lets(), dtype_of(x)
        x = lets.bind(x, "x")
        e = exp(constant(0.0, dtype) - x)
        return lets.close(x / (constant(1.0, dtype) + e))

    return apply


def _rsqrt(x: Expr) -> Expr:
    return constant(1.0, dtype_of(x)) / tirx.sqrt(x)


_EXP32 = for_target("exp", float32.exp)
_TANH32 = for_target("tanh", float32.tanh)

FUNCTIONS: dict[str, ScalarFunction] = {
    "exp": by_dtype(_EXP32, libm("exp")),
    "log": by_dtype(float32.log, libm("log")),
    "erf": by_dtype(float32.erf, libm("erf")),
    "tanh": by_dtype(_TANH32, libm("tanh")),
    "sigmoid": by_dtype(_sigmoid(_EXP32), _sigmoid(libm("exp"))),
    "gelu": by_dtype(float32.gelu, _gelu64),
    "gelu_tanh": by_dtype(_gelu_tanh(_TANH32), _gelu_tanh(libm("tanh"))),
    "silu": by_dtype(_silu(_EXP32), _silu(libm("exp"))),
    "rsqrt": by_dtype(_rsqrt, _rsqrt),
    "sqrt": by_dtype(tirx.sqrt, tirx.sqrt),
    **{
        name: by_dtype(getattr(float32_inverse, name), libm(name))
        for name in ["log1p", "expm1", "cosh", "asinh", "acosh", "atanh", "asin", "acos", "atan"]
    },
}
