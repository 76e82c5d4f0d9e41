"""Modules for the tests of ``compare``."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """A module with square linear layers, an activation, two dropouts of one shape, and a norm."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.drop, self.drop_again = nn.Dropout(0.3), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.first(x))
        hidden = self.norm(x + self.drop(hidden))
        return hidden + self.drop_again(torch.tanh(self.second(hidden)))


def block_and_input() -> tuple[nn.Module, torch.Tensor]:
    """Return a module and an input, as the command line expects of a factory."""
    torch.manual_seed(0)
    return Block(), torch.randn(5, 12)


def norm_network() -> nn.Module:
    """Return a small network with batch norm, in train mode."""
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))
