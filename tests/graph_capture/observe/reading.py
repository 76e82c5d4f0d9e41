"""A module that multiplies by a value that a function reads from outside the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Model(nn.Module):
    """Multiplies by the result of ``read``, which may read values outside the module."""

    scale = 2.0

    def __init__(self, read: Callable[[Model], Any]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.read(self)
