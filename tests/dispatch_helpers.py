"""Helpers for tests of dispatched modules: a block, samples, and a training step."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tvmbridge import remove_tvm_dispatch


class Block(nn.Module):
    """A small block with two matrix products, an activation, dropout and a residual.

    A norm would double the time of each compilation.
    """

    def __init__(self, width: int = 24, dropout: float = 0.1) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(x + self.dropout(nn.functional.gelu(self.inner(x))))


def make_block(dtype: torch.dtype = torch.float64, **kwargs: float) -> Block:
    """Return a block in ``dtype``, with the same parameters at each call."""
    torch.manual_seed(0)
    return Block(**kwargs).to(dtype)  # type: ignore[arg-type]


def sample(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return normally distributed numbers, the same at each call."""
    return torch.randn(shape or (6, 24), dtype=dtype, generator=torch.Generator().manual_seed(7))


def eager(module: nn.Module) -> nn.Module:
    """Return a copy of the module that runs the module's own forward."""
    duplicate = copy.deepcopy(module)
    if "forward" in duplicate.__dict__:
        remove_tvm_dispatch(duplicate)
    return duplicate


def train_step(module: nn.Module, x: torch.Tensor, seed: int = 3) -> dict[str, torch.Tensor]:
    """Run one step in train mode from ``seed``; return output, gradients and generator state."""
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    module.zero_grad()
    output = module(x)
    output.square().sum().backward()
    assert x.grad is not None
    results = {"output": output.detach(), "input": x.grad}
    results |= {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    results["generator"] = torch.get_rng_state()
    return results


def assert_same_step(module: nn.Module, reference: nn.Module, x: torch.Tensor) -> None:
    """Assert that one training step of both modules, from the same seed, agrees in float64."""
    ours, theirs = train_step(module, x), train_step(reference, x)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-11, atol=1e-12, msg=name)
