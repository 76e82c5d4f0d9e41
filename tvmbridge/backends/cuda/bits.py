"""The bits of a number in CUDA source, where TVM would take the address of an expression.

A product of the graph, which passes through its bits (:mod:`tvmbridge.legalize.arithmetic`), is
asked for by a function that is never made one with a sum. Those inside a polynomial are.
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
    """Tell TVM, once in a process, to call CUDA's own functions for ``reinterpret``."""
    register_intrin_lowering("tirx.reinterpret", "cuda", f=_by_function)


def _by_function(call: Expr) -> Expr:
    value, to = call.args[0], str(call.ty.dtype)
    source = str(value.ty.dtype)
    if source == to:
        return value
    product = value.args[0] if getattr(value, "op", None) == call.op else None
    if isinstance(product, tirx.Mul) and to in _PRODUCTS and str(product.ty.dtype) == to:
        return tirx.call_pure_extern(to, _PRODUCTS[to], product.a, product.b)
    # CUDA has them for signed 64-bit integers alone.
    if source == "uint64":
        value, source = tirx.Cast("int64", value), "int64"
    if to == "uint64":
        return tirx.Cast(to, _called(value, source, "int64"))
    return _called(value, source, to)


def _called(value: Expr, source: str, to: str) -> Expr:
    if {source, to} <= {"int32", "uint32"} or {source, to} <= {"int64", "uint64"}:
        return tirx.Cast(to, value)
    return tirx.call_pure_extern(to, _FUNCTIONS[source, to], value)
