"""Concatenations with operands that have no elements."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report


class _Rotary(nn.Module):
    """Rotates the first elements of each head, here all of them, and keeps the empty rest."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8, dtype=torch.float64)
        self.rest = nn.Parameter(torch.empty(2, 0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        first, rest = y[..., :8], y[..., 8:]
        return torch.cat([first.cos() * first, rest, self.rest], -1) + torch.cat([y])


def test_empty_operands_leave_the_concatenation_compiled() -> None:
    torch.manual_seed(0)
    module = _Rotary()
    eager = copy.deepcopy(module)
    x = torch.randn(2, 6, dtype=torch.float64)
    add_tvm_dispatch(module, x)
    results = []
    for each in (module, eager):
        given = x.clone().requires_grad_()
        result = each(given)
        result.square().sum().backward()
        gradients = [None if p.grad is None else p.grad.clone() for p in each.parameters()]
        results.append((result.detach(), result.stride(), given.grad, gradients))
    torch.testing.assert_close(*results)
    report = dispatch_report(module)
    assert report.tvm_calls == 1
    assert "aten.cat" not in str(report)
