"""Memory for compiled code from PyTorch's caching allocator, on the current stream, and its end."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import tvm_ffi

from tvmbridge.core.called_in_mode import without_gradients
from tvmbridge.core.compiled_half import compiled_half
from tvmbridge.kernels.callbacks import integers
from tvmbridge.kernels.dtypes import from_relax_dtype

EMPTY = "tvmbridge.empty"
EMPTY_RESIDUALS = "tvmbridge.empty_residuals"


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


def run_empty_residuals(_residuals: Any) -> None:
    """Leave the array as it is, which only the compiled half can empty.

    Registered in TVM as :data:`EMPTY_RESIDUALS`. Backward calls it once it has read the array.
    """


@contextlib.contextmanager
def residuals_emptied() -> Iterator[None]:
    """Let the backward that runs in the context free each residual after its last use.

    Backward then empties the array of residuals that it is given, so that it cannot run again.
    Without a compiled half the residuals live until the caller drops them.
    """
    half = compiled_half("tvmbridge.kernels._products")
    if half is None:
        yield
        return
    half.let_empty(True)
    try:
        yield
    finally:
        half.let_empty(False)


def note(tensor: torch.Tensor) -> torch.Tensor:
    """Remember the storage of a tensor that is handed to compiled code; return the tensor."""
    half = compiled_half("tvmbridge.kernels._products")
    if half is not None:
        half.note(tensor)
    return tensor


def take_back(results: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Return results of compiled code, those on a GPU as tensors of PyTorch's allocator.

    A tensor from DLPack has a storage of its own, on which ``Tensor.record_stream`` does nothing.
    Sends by NCCL rely on it: the memory of a sent gradient could be used again before it was read.
    A result whose storage is not known is copied; results in the memory of ``arguments`` are not.
    """
    return [
        _taken_back(r, arguments) if isinstance(r, torch.Tensor) and r.is_cuda else r
        for r in results
    ]


def _taken_back(result: torch.Tensor, arguments: Sequence[Any]) -> torch.Tensor:
    half = compiled_half("tvmbridge.kernels._products")
    taken: torch.Tensor | None = None if half is None else half.take_back(result)
    if taken is not None:
        return taken
    address = _address(result)
    if any(isinstance(a, torch.Tensor) and _address(a) == address for a in arguments):
        return result
    return without_gradients(_copied, result)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
