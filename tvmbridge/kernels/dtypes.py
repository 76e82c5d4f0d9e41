"""The one mapping between PyTorch's dtypes and TVM's.

TVM has no complex numbers. A complex tensor is a real one in compiled code, with a last dimension
of two, as ``torch.view_as_real`` gives it; only ATen calls read and make such pairs.
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
    """TVM's name of ``dtype``; KeyError where TVM has none (complex, quantised)."""
    return _NAMES[dtype]


_PAIRS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def has_type(dtype: torch.dtype) -> bool:
    """Whether tensors of ``dtype`` have a type in compiled code, be it as pairs."""
    return dtype in _NAMES or dtype in _PAIRS


def tensor_type(shape: Sequence[int], dtype: torch.dtype) -> relax.TensorType:
    """The type of a tensor of ``dtype`` in compiled code."""
    extents = [int(extent) for extent in shape]
    if dtype in _PAIRS:
        return relax.TensorType([*extents, 2], _NAMES[_PAIRS[dtype]])
    return relax.TensorType(extents, to_relax_dtype(dtype))


def as_pairs(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as compiled code has it; any other as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def from_relax_dtype(name: str) -> torch.dtype:
    """PyTorch's dtype for TVM's name."""
    return _DTYPES[name]
