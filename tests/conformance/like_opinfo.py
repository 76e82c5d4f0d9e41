"""What operators that OpInfo has no samples of answer, as OpInfo's do."""

from __future__ import annotations

import torch

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})


class LikeOpInfo:
    """An operator with the attributes of OpInfo that a run reads."""

    name: str
    variant_test_name: str
    dtypes: frozenset[torch.dtype]
    gradient: bool

    @property
    def supports_autograd(self) -> bool:
        """Whether its gradient is checked."""
        return self.gradient

    def supported_dtypes(self, device: str) -> frozenset[torch.dtype]:
        """The dtypes of its tensors."""
        return self.dtypes

    def supported_backward_dtypes(self, device: str) -> frozenset[torch.dtype]:
        """The dtypes in which it has a gradient."""
        return self.dtypes & FLOATS
