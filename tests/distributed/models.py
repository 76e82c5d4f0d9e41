"""Modules for pipelines, and reference steps by one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY, WIDTH = 11, 16


class Block(nn.Module):
    """A residual block, with dropout on its branch."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.second(torch.tanh(self.first(self.norm(x)))))


class Language(nn.Module):
    """A small language model; with ``tied`` its head shares the embedding's weight."""

    def __init__(self, blocks: int = 4, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block(dropout=dropout) for _ in range(blocks)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


class Images(nn.Module):
    """Convolutions with batch norm, whose running statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        layers = []
        for inside, outside in ((3, 4), (4, 4), (4, 6)):
            layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside)]
            layers.append(nn.ReLU(inplace=True))
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(6, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(images).mean((2, 3)))


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy over all dimensions before the classes."""
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def tokens(batch: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of the language model, equal in each process."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, VOCABULARY, (batch, 6), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def reference_steps(
    module: nn.Module,
    loss: Callable[..., torch.Tensor],
    batches: list[tuple[Any, Any]],
    microbatches: int,
    optimizer: Callable[..., torch.optim.Optimizer],
    clip: float | None = None,
) -> torch.Tensor:
    """Train in this process on the same micro-batches; return the losses of all micro-batches."""
    chosen = optimizer(module.parameters())
    losses = []
    for inputs, targets in batches:
        for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            one = loss(module(x), y)
            (one / microbatches).backward()
            losses.append(one.detach())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        chosen.step()
        chosen.zero_grad()
    return torch.stack(losses)
