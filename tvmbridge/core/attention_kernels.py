"""PyTorch's attention kernels that are switched off, for instance by ``sdpa_kernel``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

SwitchedOff: TypeAlias = tuple[str, ...]

_cuda = torch.backends.cuda
_ENABLED: tuple[tuple[str, Callable[[], bool]], ...] = (
    ("flash", _cuda.flash_sdp_enabled),
    ("efficient", _cuda.mem_efficient_sdp_enabled),
    ("math", _cuda.math_sdp_enabled),
    ("cudnn", _cuda.cudnn_sdp_enabled),
)


def attention_switched_off() -> SwitchedOff:
    """Return the names of attention kernels that are switched off; code is compiled for them."""
    return tuple(name for name, enabled in _ENABLED if not enabled())
