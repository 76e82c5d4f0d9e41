"""What tests of shared memory share: a module, its input, and who shares memory with whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


class Applied(nn.Module):
    """``function(self, x)`` with a parameter and a buffer at hand."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6))
        self.register_buffer("buffer", torch.ones(6))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def rows() -> torch.Tensor:
    """Three rows of six numbers."""
    return torch.linspace(-1, 2, 18).reshape(3, 6)


def relations(outputs: Any, module: Any, x: torch.Tensor) -> list[Any]:
    """Who is whom, and who shares memory with whom where."""
    known = [*pytree.tree_leaves(outputs), x, module.weight, module.buffer]
    places = [t.untyped_storage().data_ptr() for t in known]
    found: list[Any] = []
    for i, a in enumerate(known[:-3]):
        for j, b in enumerate(known):
            shared = places[i] == places[j] and (a.storage_offset() - b.storage_offset())
            found.append((i, j, a is b, shared))
        found.append((a.requires_grad, a.grad_fn is None, tuple(a.shape)))
    return found
