"""A module whose three weights are packed into one, and helpers for tests of it."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report, remove_tvm_dispatch

NAMES = ("query.weight", "key.weight", "value.weight")


class Attention(nn.Module):
    """Attention with grouped queries: key and value have fewer columns than the query."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        mixed = torch.softmax(query.view(-1, 8) @ key.T, -1) @ value
        return torch.tanh(mixed)


def make(training: bool = False) -> Attention:
    """Return the module in float64, the same at each call."""
    torch.manual_seed(0)
    return Attention().double().train(training)


def sample() -> torch.Tensor:
    """Return the module's input."""
    return torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def dispatched(training: bool = False) -> nn.Module:
    """Return the module, dispatched with code that combines the three matrix products."""
    options = {"combine_matmuls": "always"}
    x = sample().requires_grad_(training)
    return add_tvm_dispatch(make(training), x, options=options)


def members(module: nn.Module) -> list[torch.Tensor]:
    """Return the weights that are packed."""
    return [module.get_parameter(name) for name in NAMES]


def assert_right(module: nn.Module) -> None:
    """Assert that compiled code serves a call, and agrees with eager PyTorch."""
    own = copy.deepcopy(module)
    remove_tvm_dispatch(own)
    before = dispatch_report(module).tvm_calls
    with torch.no_grad():
        torch.testing.assert_close(module(sample()), own(sample()), rtol=1e-13, atol=1e-13)
    assert dispatch_report(module).tvm_calls == before + 1


def packed(module: nn.Module) -> tuple[int, dict[str, int]]:
    """Return how often the weights were packed, and counts of reasons to concatenate instead."""
    (report,) = dispatch_report(module).packs
    assert report.names == NAMES
    return report.packed, dict(report.concatenated)


def packed_copy(served: nn.Module) -> nn.Module:
    """Return a packed copy of a dispatched module, which shares the module's compiled code."""
    duplicate = copy.deepcopy(served)
    assert_right(duplicate)
    assert packed(duplicate) == (1, {})
    return duplicate
