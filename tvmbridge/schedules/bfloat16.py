"""bfloat16 in vector loops: a value in flight is a float32 that bfloat16 can represent.

TVM's own legalisation of bfloat16 does not support bound variables. Without it, a conversion
becomes a library call for every element. So expressions are rewritten here: every operation on
bfloat16 runs in float32 and rounds its result to nearest even, as PyTorch does. Memory holds 16
bits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Expr

from tvmbridge.core.set_within import set_within

NAME = "bfloat16"
_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min)
# Whether `rounded` uses CUDA's own conversion.
_by_cuda: ContextVar[bool] = ContextVar("by_cuda", default=False)
_COMPARISONS = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)


class BFloat16Error(Exception):
    """An expression of bfloat16 cannot be rewritten."""


def held_as(dtype: str) -> str:
    """Return the dtype in which values of ``dtype`` are computed."""
    return "float32" if dtype == NAME else dtype


def stored_as(dtype: str) -> str:
    """Return the dtype of intermediate buffers for elements of ``dtype``: uint16 for bfloat16."""
    return "uint16" if dtype == NAME else dtype


def from_memory(value: Expr, dtype: str) -> Expr:
    """Return a loaded element of ``dtype`` (or its bits) as float32, if it is bfloat16."""
    if dtype != NAME:
        return value
    bits = tirx.reinterpret("uint16", value) if _dtype(value) == NAME else value
    return tirx.reinterpret("float32", tirx.Cast("uint32", bits) << tirx.const(16, "uint32"))


def to_memory(value: Expr, dtype: str, memory: str) -> Expr:
    """Return a value of ``dtype`` (rounded already) as an element of memory of ``memory``."""
    if dtype != NAME:
        return value
    half = tirx.reinterpret("uint32", value) >> tirx.const(16, "uint32")
    bits = tirx.Cast("uint16", half)
    return tirx.reinterpret(NAME, bits) if memory == NAME else bits


def rounded_by_cuda(enabled: bool = True) -> AbstractContextManager[object]:
    """Make :func:`rounded` use CUDA's conversion instruction, which only CUDA source can call."""
    return set_within(_by_cuda, enabled)


def rounded(value: Expr) -> Expr:
    """Return a float32 rounded to the nearest bfloat16 value, ties to even; NaN stays NaN."""
    if _by_cuda.get():
        half = tirx.call_pure_extern(NAME, "__float2bfloat16_rn", value)
        return tirx.call_pure_extern("float32", "__bfloat162float", half)
    var = tirx.Var("unrounded", "float32")
    bits = tirx.reinterpret("uint32", var)

    def u32(number: int) -> Expr:
        return tirx.const(number, "uint32")

    odd = (bits >> u32(16)) & u32(1)
    near = tirx.reinterpret("float32", (bits + odd + u32(0x7FFF)) & u32(0xFFFF0000))
    quiet = tirx.reinterpret("float32", u32(0x7FC00000))
    is_nan = (bits & u32(0x7FFFFFFF)) > u32(0x7F800000)
    return tirx.Let(var, value, tirx.Select(is_nan, quiet, near))


def widen(expr: Expr) -> Expr:
    """Rewrite an expression to compute in float32; its reads must be float32 variables already."""
    names: dict[Any, Expr] = {}

    def binary(node: Any, mutator: Any) -> Expr:
        result = type(node)(mutator.mutate(node.a), mutator.mutate(node.b))
        return rounded(result) if _is_arithmetic(node) and _dtype(node) == NAME else result

    def cast(node: tirx.Cast, mutator: Any) -> Expr:
        dtype, value = _dtype(node), mutator.mutate(node.value)
        if dtype != NAME:
            return value if _dtype(value) == dtype else tirx.Cast(dtype, value)
        if _dtype(node.value) == NAME:
            return value
        return rounded(value if _dtype(value) == "float32" else tirx.Cast("float32", value))

    def select(node: tirx.Select, mutator: Any) -> Expr:
        parts = (node.condition, node.true_value, node.false_value)
        return tirx.Select(*[mutator.mutate(part) for part in parts])

    def let(node: tirx.Let, mutator: Any) -> Expr:
        value = mutator.mutate(node.value)
        names[node.var] = tirx.Var(node.var.name, _dtype(value))
        return tirx.Let(names[node.var], value, mutator.mutate(node.body))

    def immediate(node: tirx.FloatImm, _: Any) -> Expr:
        return tirx.const(node.value, held_as(_dtype(node)))

    def call(node: Call, mutator: Any) -> Expr:
        args = [mutator.mutate(arg) for arg in node.args]
        name = getattr(node.op, "name", "")
        if name == "prim.if_then_else":
            return tirx.if_then_else(*args)
        if NAME not in (_dtype(node), *(_dtype(arg) for arg in node.args)):
            return tirx.call_intrin(_dtype(node), node.op, *args)
        raise BFloat16Error(name)

    return tvm_ffi.structural_mutate(
        expr,
        [
            ((*_ARITHMETIC, *_COMPARISONS), binary),
            (tirx.Cast, cast),
            (tirx.Select, select),
            (tirx.Let, let),
            (tirx.FloatImm, immediate),
            (Call, call),
            (tirx.Var, lambda var, _: names.get(var, var)),
        ],
    )


def _is_arithmetic(node: Any) -> bool:
    return isinstance(node, _ARITHMETIC)


def _dtype(value: Any) -> str:
    return str(value.ty.dtype) if hasattr(value.ty, "dtype") else ""
