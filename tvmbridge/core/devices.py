"""PyTorch devices in the form that PyTorch's functions for random state and streams take."""

from __future__ import annotations

import torch


def gpu_index(device: torch.device) -> int:
    """Return the number of the GPU; the current GPU's number if ``device`` has no index."""
    return torch.cuda.current_device() if device.index is None else device.index


def gpus_of(device: torch.device) -> list[int]:
    """Return the GPUs whose generators a module on ``device`` uses, as ``fork_rng`` takes them."""
    return [gpu_index(device)] if device.type == "cuda" else []
