"""Autocast's lists: the operators that have an autocast kernel in PyTorch's dispatcher."""

from __future__ import annotations

from typing import Any

import torch

from tvmbridge.core.torch_private import DispatchKey, has_kernel, pytree

# In the order in which the dispatcher calls their kernels.
KEYS = {"cuda": DispatchKey.AutocastCUDA, "cpu": DispatchKey.AutocastCPU}


def devices_in_force(args: Any, kwargs: Any) -> list[str]:
    """Return the device types among the tensor arguments for which autocast is enabled."""
    on = [device for device in KEYS if torch.is_autocast_enabled(device)]
    if not on:
        return []
    leaves = pytree.tree_leaves((args, kwargs))
    found = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return [device for device in on if device in found]


def is_listed(name: str, device: str) -> bool:
    """Whether autocast casts for the operator ``name`` (``aten::mm``) on ``device``."""
    found: bool = has_kernel(name, KEYS[device].name)
    return found


def cast_to_float32(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments in float32 if autocast is on and lists the operator ``aten::name``.

    Only call it for operators that autocast runs in float32.
    """
    devices = [d for d in devices_in_force(args, kwargs) if is_listed(f"aten::{name}", d)]
    if not devices:
        return args, kwargs

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        cast_here = tensor.is_floating_point() and tensor.dtype is not torch.float64
        return tensor.float() if cast_here and tensor.device.type in devices else tensor

    found: tuple[Any, Any] = pytree.tree_map_only(torch.Tensor, cast, (args, kwargs))
    return found
