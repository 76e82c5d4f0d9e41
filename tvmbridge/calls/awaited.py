"""Results of collectives that may be under way when a call gets them as arguments."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from tvmbridge.core.torch_private import pytree

Structure = TypeVar("Structure")


def is_pending(value: object) -> bool:
    """Whether ``value`` is a tensor of PyTorch that waits for its collective when it is read."""
    return type(value).__name__ == "AsyncCollectiveTensor" and isinstance(value, torch.Tensor)


def awaited(arguments: Structure) -> Structure:
    """Wait for the collectives whose results are in ``arguments``; return plain tensors instead."""
    if not any(map(is_pending, pytree.tree_leaves(arguments))):
        return arguments
    found: Structure = pytree.tree_map(_plain, arguments)
    return found


def _plain(value: Any) -> Any:
    return _Awaited.apply(value) if is_pending(value) else value  # type: ignore[no-untyped-call]


class _Awaited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: Any) -> torch.Tensor:
        # Several modules may read the same result, and each sets its own history.
        result: torch.Tensor = pending.trigger_wait().detach()
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
