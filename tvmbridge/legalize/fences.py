"""What LLVM may not make of the graph's arithmetic: each operator rounds, or wraps, by itself.

LLVM makes one operation of a product and a sum where the processor has it, and rounds once. Then
``sqrt(x * x - y * y)`` of equal numbers is NaN half of the time, which is 0 in PyTorch. And TVM
tells it that integers never overflow. The results of the graph's operators pass through their bits
(:mod:`tvmbridge.legalize.arithmetic`), which tells them from those inside a polynomial or an index;
when loops are lowered to LLVM these get a fence, which costs nothing but the fused operation.
"""

from __future__ import annotations

import functools

from tvm import tirx
from tvm.ir import Expr
from tvm.tirx.op import register_intrin_lowering

_REINTERPRET = "tirx.reinterpret"
_FENCE = "llvm.arithmetic.fence"


@functools.cache
def fence_arithmetic() -> None:
    """Tell TVM, once in a process, to lower results that pass through their bits with a fence."""
    register_intrin_lowering(_REINTERPRET, "llvm", f=_fenced)


def _fenced(call: Expr) -> Expr:
    bits = call.args[0]
    if isinstance(bits, tirx.IntImm) and not bits.value and str(call.ty.dtype).startswith("float"):
        # Of an integer that is zero TVM makes pointers alone.
        return tirx.const(0.0, str(call.ty.dtype))
    if getattr(bits, "op", None) != call.op:
        return call
    (result,) = bits.args
    dtype = str(call.ty.dtype)
    if str(result.ty.dtype) != dtype:
        return call
    if dtype.startswith("float") and isinstance(result, tirx.Mul):
        return tirx.call_llvm_pure_intrin(dtype, _FENCE, result)
    if dtype.startswith("int") and isinstance(result, tirx.Add | tirx.Sub | tirx.Mul):
        # LLVM has it for floats alone.
        fenced = tirx.call_llvm_pure_intrin(str(bits.ty.dtype), _FENCE, bits)
        return tirx.reinterpret(dtype, fenced)
    return call
