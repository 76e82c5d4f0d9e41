"""Memory for compiled code from PyTorch's caching allocator, on the current stream."""

from __future__ import annotations

import functools

import torch
import tvm_ffi

from tvmbridge.kernels.callbacks import integers
from tvmbridge.kernels.dtypes import from_relax_dtype

EMPTY = "tvmbridge.empty"


def run_empty(shape: bytes, dtype: int | str) -> torch.Tensor:
    """Return an uninitialised tensor on the current GPU; registered in TVM as :data:`EMPTY`."""
    return torch.empty(integers(shape), dtype=_dtype(dtype), device="cuda")


@functools.cache
def _dtype(packed: int | str) -> torch.dtype:
    """Return PyTorch's dtype for a DLPack dtype: code, bits and lanes packed into one integer.

    TVM's virtual machine passes the dtype's name instead if an instrument watches its calls.
    """
    if isinstance(packed, str):
        return from_relax_dtype(packed)
    fields = (packed & 255, packed >> 8 & 255, packed >> 16)
    return from_relax_dtype(str(tvm_ffi.dtype.from_dlpack_data_type(fields)))
