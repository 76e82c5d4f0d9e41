"""The class of cases of gradient rules, and inputs that are hard for many rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

NAN, INF = float("nan"), float("inf")

# Signed zeros, the ends of domains, and values where a naive formula overflows.
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, 30.0, -30.0, 800.0, -800.0, INF, -INF, NAN)


@dataclass(frozen=True)
class Case:
    """A formula with the operator of a gradient rule, in Relax and in PyTorch.

    - ``rule``: the name of the rule; ``name``: of the case.
    - ``relax``, ``torch``: the formula; it returns one result or several.
    - ``inputs``: all floating-point inputs are differentiated.
    """

    rule: str
    name: str
    relax: Callable[..., Any]
    torch: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]

    def __str__(self) -> str:
        return f"{self.rule.removeprefix('relax.')}-{self.name}"


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return normally distributed numbers, the same for the same shape and seed."""
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def integers(*shape: int, high: int = 3, seed: int = 0) -> torch.Tensor:
    """Return small integers as float64, with many ties and zeros."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-high + 1, high, shape, generator=generator).double()


def mask(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return random booleans."""
    return normal(*shape, seed=seed + 77) > 0


def special() -> torch.Tensor:
    """Return :data:`SPECIAL` as a tensor."""
    return torch.tensor(SPECIAL, dtype=torch.float64)
