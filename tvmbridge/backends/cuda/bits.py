"""Lower ``reinterpret`` for CUDA: TVM's own lowering takes the address of an expression.

:mod:`tvmbridge.legalize.arithmetic` wraps each product of the graph in a pair of ``reinterpret``.
Here such a product becomes ``__fmul_rn``, which the CUDA compiler never contracts with a sum into
an FMA. Products inside the polynomials of elementwise functions are not wrapped and may be
contracted.
"""

from __future__ import annotations

import functools

from tvm import tirx
from tvm.ir import Expr
from tvm.tirx.op import register_intrin_lowering

_FUNCTIONS = {
    ("float32", "int32"): "__float_as_int",
    ("float32", "uint32"): "__float_as_uint",
    ("int32", "float32"): "__int_as_float",
    ("uint32", "float32"): "__uint_as_float",
    ("float64", "int64"): "__double_as_longlong",
    ("int64", "float64"): "__longlong_as_double",
    ("bfloat16", "uint16"): "__bfloat16_as_ushort",
    ("uint16", "bfloat16"): "__ushort_as_bfloat16",
    ("float16", "uint16"): "__half_as_ushort",
    ("uint16", "float16"): "__ushort_as_half",
}

_PRODUCTS = {"float32": "__fmul_rn", "float64": "__dmul_rn"}


@functools.cache
def register_bits() -> None:
    """Register, once in a process, CUDA's own functions as TVM's lowering of ``reinterpret``."""
    register_intrin_lowering("tirx.reinterpret", "cuda", f=_by_function)


def _by_function(call: Expr) -> Expr:
    value, to = call.args[0], str(call.ty.dtype)
    source = str(value.ty.dtype)
    if source == to:
        return value
    product = value.args[0] if getattr(value, "op", None) == call.op else None
    if isinstance(product, tirx.Mul) and to in _PRODUCTS and str(product.ty.dtype) == to:
        return tirx.call_pure_extern(to, _PRODUCTS[to], product.a, product.b)
    # CUDA's functions exist for signed 64-bit integers only.
    if source == "uint64":
        value, source = tirx.Cast("int64", value), "int64"
    if to == "uint64":
        return tirx.Cast(to, _called(value, source, "int64"))
    return _called(value, source, to)


def _called(value: Expr, source: str, to: str) -> Expr:
    if {source, to} <= {"int32", "uint32"} or {source, to} <= {"int64", "uint64"}:
        return tirx.Cast(to, value)
    return tirx.call_pure_extern(to, _FUNCTIONS[source, to], value)
