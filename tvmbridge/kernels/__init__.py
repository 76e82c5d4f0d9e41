"""PyTorch's kernels, registered with TVM as external functions that Relax code calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import tvm_ffi

from tvmbridge.core.compiled_half import compiled_half
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.kernels.allocation import (
    EMPTY,
    EMPTY_RESIDUALS,
    run_empty,
    run_empty_residuals,
)
from tvmbridge.kernels.aten_call import ATEN_CALL, described_call, run_aten_call
from tvmbridge.kernels.callbacks import callback
from tvmbridge.kernels.matmul import (
    MATMUL,
    ONEDNN_MATMUL,
    described_product,
    run_matmul,
    run_onednn_matmul,
)
from tvmbridge.kernels.packed import PACKED_MATMUL, run_packed_matmul
from tvmbridge.kernels.packed_convolution import PACKED_CONVOLUTION, run_packed_convolution
from tvmbridge.kernels.sized import SIZED, key_at, with_sizes

# Each kernel is called with a spec (or the key of a spec) and tensors.
KERNELS: dict[str, Callable[..., Any]] = {
    ATEN_CALL: run_aten_call,
    EMPTY: run_empty,
    EMPTY_RESIDUALS: run_empty_residuals,
    MATMUL: run_matmul,
    ONEDNN_MATMUL: run_onednn_matmul,
    PACKED_MATMUL: run_packed_matmul,
    PACKED_CONVOLUTION: run_packed_convolution,
}


@functools.cache
def register_kernels() -> None:
    """Register the kernels with TVM; done once in a process, before the first build."""
    # Registered errors keep their class when C++ extensions or passes raise them through TVM.
    for error in (UnsupportedOperatorError, torch.OutOfMemoryError, NotImplementedError):
        tvm_ffi.register_error(error.__name__, error)
    for name, kernel in KERNELS.items():
        tvm_ffi.register_global_func(name, callback(kernel), override=True)
        tvm_ffi.register_global_func(name + SIZED, callback(with_sizes(kernel)), override=True)
    half = compiled_half("tvmbridge.kernels._products")
    if half is not None:
        names = MATMUL, ONEDNN_MATMUL, ATEN_CALL, EMPTY, EMPTY_RESIDUALS
        half.register_kernels(*names, described_product, described_call, SIZED, key_at)
