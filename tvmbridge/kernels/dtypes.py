"""The mapping between PyTorch's dtypes and TVM's.

TVM has no complex numbers. In compiled code a complex tensor is a real tensor with a last dimension
of two, as ``torch.view_as_real`` returns it. Only ATen calls read and create such pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tvm import relax

_NAMES: dict[torch.dtype, str] = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def is_supported(dtype: torch.dtype) -> bool:
    """Whether tensors of ``dtype`` can enter compiled code."""
    return dtype in _NAMES


def to_relax_dtype(dtype: torch.dtype) -> str:
    """Return TVM's name of ``dtype``.

    Raises:
        KeyError: TVM has no such dtype (complex, quantised).
    """
    return _NAMES[dtype]


_PAIRS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def has_type(dtype: torch.dtype) -> bool:
    """Whether compiled code can hold tensors of ``dtype``; complex ones as pairs of numbers."""
    return dtype in _NAMES or dtype in _PAIRS


def tensor_type(shape: Sequence[int], dtype: torch.dtype) -> relax.TensorType:
    """Return the Relax type of a tensor; a complex one has a last dimension of two."""
    extents = [int(extent) for extent in shape]
    if dtype in _PAIRS:
        return relax.TensorType([*extents, 2], _NAMES[_PAIRS[dtype]])
    return relax.TensorType(extents, to_relax_dtype(dtype))


def as_pairs(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as a real one of pairs; return any other tensor unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def from_relax_dtype(name: str) -> torch.dtype:
    """Return PyTorch's dtype for a TVM name."""
    return _DTYPES[name]
