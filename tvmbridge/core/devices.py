"""PyTorch's devices, as its functions on random state and streams want them."""

from __future__ import annotations

import torch


def gpu_index(device: torch.device) -> int:
    """The number of a GPU; that of the current one where ``device`` names none."""
    return torch.cuda.current_device() if device.index is None else device.index


def gpus_of(device: torch.device) -> list[int]:
    """The GPUs whose generators draw for a module on ``device``, for ``torch.random.fork_rng``."""
    return [gpu_index(device)] if device.type == "cuda" else []
