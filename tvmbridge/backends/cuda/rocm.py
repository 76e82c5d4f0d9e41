"""Lowerings that TVM lacks for AMD GPUs: shuffles within 32 lanes, and functions of doubles."""

from __future__ import annotations

import functools

from tvm import tirx
from tvm.ir import Expr
from tvm.tirx.op import register_intrin_lowering

# The pattern of ds_swizzle: an AND mask over the five bits of the lane number within a group of 32,
# and the position of the XOR mask.
_KEPT = 0x1F
_TURNED = 10


@functools.cache
def register_rocm() -> None:
    """Register, once in a process, the lowerings for AMD GPUs that our kernels need."""
    register_intrin_lowering("tirx.tvm_warp_shuffle_xor", "rocm", f=_exchanged)
    register_intrin_lowering("tirx.call_pure_extern", "rocm", f=_from_device_library)


def _exchanged(call: Expr) -> Expr:
    _, value, offset, _, _ = call.args
    dtype = str(value.ty.dtype)
    pattern = tirx.const(int(offset) << _TURNED | _KEPT, "int32")
    if dtype in ("float32", "int32"):
        return tirx.reinterpret(dtype, _swizzled(tirx.reinterpret("int32", value), pattern))
    bits = tirx.reinterpret("int64", value)
    low = _swizzled(tirx.Cast("int32", bits), pattern)
    high = _swizzled(tirx.Cast("int32", bits >> tirx.const(32, "int64")), pattern)
    wide = tirx.Cast("int64", high) << tirx.const(32, "int64")
    mask = tirx.const(0xFFFFFFFF, "int64")
    return tirx.reinterpret(dtype, wide | (tirx.Cast("int64", low) & mask))


def _swizzled(value: Expr, pattern: Expr) -> Expr:
    return tirx.call_llvm_pure_intrin("int32", "llvm.amdgcn.ds.swizzle", value, pattern)


def _from_device_library(call: Expr) -> Expr:
    """Return ``call`` under its name in AMD's device library, if it is a C function of doubles."""
    name, *arguments = call.args
    dtype = str(call.ty.dtype)
    if dtype != "float64" or name.value.startswith("__"):
        return call
    return tirx.call_pure_extern(dtype, f"__ocml_{name.value}_f64", *arguments)
