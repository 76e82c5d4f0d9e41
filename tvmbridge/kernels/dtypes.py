"""The one mapping between PyTorch's dtypes and TVM's."""

from __future__ import annotations

import torch

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


def from_relax_dtype(name: str) -> torch.dtype:
    """PyTorch's dtype for TVM's name."""
    return _DTYPES[name]
