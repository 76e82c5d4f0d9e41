"""PyTorch's kernels of attention that are switched off, by ``sdpa_kernel`` for instance."""

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
    """Their names, which code is compiled for; none of them by default."""
    return tuple(name for name, enabled in _ENABLED if not enabled())
