"""The base class of operators that OpInfo lacks, with the attributes that OpInfo objects have."""

from __future__ import annotations

import torch

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})


class LikeOpInfo:
    """An operator with the attributes of an OpInfo object that a run reads."""

    name: str
    variant_test_name: str
    dtypes: frozenset[torch.dtype]
    gradient: bool

    @property
    def supports_autograd(self) -> bool:
        """Whether the operator's gradient is checked."""
        return self.gradient

    def supported_dtypes(self, device: str) -> frozenset[torch.dtype]:
        """Return the dtypes of the operator's tensors."""
        return self.dtypes

    def supported_backward_dtypes(self, device: str) -> frozenset[torch.dtype]:
        """Return the dtypes in which the operator has a gradient."""
        return self.dtypes & FLOATS
