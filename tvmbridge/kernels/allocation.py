"""Memory for compiled code from PyTorch's caching allocator, on the current stream."""

from __future__ import annotations

from typing import Any

import torch

from tvmbridge.kernels.dtypes import from_relax_dtype

EMPTY = "tvmbridge.empty"

_dtypes: dict[Any, torch.dtype] = {}


def run_empty(shape: Any, dtype: Any) -> torch.Tensor:
    """An uninitialised tensor on the current GPU; registered with TVM under :data:`EMPTY`."""
    name = str(dtype)
    found = _dtypes.get(name)
    if found is None:
        found = _dtypes[name] = from_relax_dtype(name)
    return torch.empty(tuple(shape), dtype=found, device="cuda")
