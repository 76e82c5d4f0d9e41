"""Private names that only GPU builds of PyTorch have."""

from __future__ import annotations

from typing import Any

import torch

from .checks import PrivateName


def _frees(clear: Any) -> bool:
    if torch.cuda.is_available():
        clear()
    return True


_NAMES = (
    PrivateName(
        "torch._C._cuda_clearCublasWorkspaces",
        "workspaces of cuBLAS, which a captured graph must not share with another",
        _frees,
    ),
    PrivateName(
        "torch._C._cuda_getCurrentRawStream",
        "the stream of a call, compared at each",
        lambda ask: not torch.cuda.is_available() or isinstance(ask(0), int),
    ),
)

GPU = _NAMES if torch.backends.cuda.is_built() else ()
