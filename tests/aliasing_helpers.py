"""Helpers for tests of shared memory: a module, its input, and a record of shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


class Applied(nn.Module):
    """A module whose forward is ``function(self, x)``, with a parameter and a buffer."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6))
        self.register_buffer("buffer", torch.ones(6))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def rows() -> torch.Tensor:
    """Return three rows of six numbers."""
    return torch.linspace(-1, 2, 18).reshape(3, 6)


def relations(outputs: Any, module: Any, x: torch.Tensor) -> list[Any]:
    """Return how outputs relate to one another, to ``x``, and to the parameter and the buffer.

    For each pair: whether both are the same object, and the difference of their storage offsets,
    or False if the storages differ. For each output: autograd flags and shape.
    """
    known = [*pytree.tree_leaves(outputs), x, module.weight, module.buffer]
    places = [t.untyped_storage().data_ptr() for t in known]
    found: list[Any] = []
    for i, a in enumerate(known[:-3]):
        for j, b in enumerate(known):
            shared = places[i] == places[j] and (a.storage_offset() - b.storage_offset())
            found.append((i, j, a is b, shared))
        found.append((a.requires_grad, a.grad_fn is None, tuple(a.shape)))
    return found
