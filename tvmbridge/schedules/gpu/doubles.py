"""Exact float64 constants in CUDA source: TVM prints constants with fifteen decimals."""

from __future__ import annotations

import struct

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr


def exact_doubles(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return ``func`` with the bits of each float64 constant that would be printed inexactly."""
    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.FloatImm, _exact)))


def _exact(constant: tirx.FloatImm) -> Expr:
    value = float(constant.value)
    if str(constant.ty.dtype) != "float64" or float(f"{value:.15f}") == value:
        return constant
    (bits,) = struct.unpack("q", struct.pack("d", value))
    return tirx.reinterpret("float64", tirx.IntImm("int64", bits))
