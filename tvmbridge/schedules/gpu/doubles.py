"""float64 constants for CUDA source, by their bits: TVM prints them with fifteen decimals."""

from __future__ import annotations

import struct

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr


def exact_doubles(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """``func`` without float64 constants that would be printed as another number."""
    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.FloatImm, _exact)))


def _exact(constant: tirx.FloatImm) -> Expr:
    value = float(constant.value)
    if str(constant.ty.dtype) != "float64" or float(f"{value:.15f}") == value:
        return constant
    (bits,) = struct.unpack("q", struct.pack("d", value))
    return tirx.reinterpret("float64", tirx.IntImm("int64", bits))
