"""Fences that keep LLVM from fusing operators' arithmetic: each operator rounds, or wraps, itself.

If the processor has fused multiply-add, LLVM fuses a product and a sum and rounds once. Then
``sqrt(x * x - y * y)`` of equal numbers is NaN half of the time; PyTorch returns 0. Also, TVM
declares to LLVM that integers never overflow.

The results of the graph's operators are reinterpreted twice (:mod:`tvmbridge.legalize.arithmetic`),
unlike results inside a polynomial or an index. The lowering to LLVM gives them a fence, whose only
cost is that the operations are not fused.
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
    """Register with TVM, once in a process, the lowering of reinterpreted results to fences."""
    register_intrin_lowering(_REINTERPRET, "llvm", f=_fenced)


def _fenced(call: Expr) -> Expr:
    bits = call.args[0]
    if isinstance(bits, tirx.IntImm) and not bits.value and str(call.ty.dtype).startswith("float"):
        # TVM reinterprets the integer 0 only as a pointer.
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
        # LLVM has fences only for floats.
        fenced = tirx.call_llvm_pure_intrin(str(bits.ty.dtype), _FENCE, bits)
        return tirx.reinterpret(dtype, fenced)
    return call
