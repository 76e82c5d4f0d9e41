"""Third-party operators whose derivative reads values: results equal eager PyTorch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report


@torch.library.custom_op("tvmbridge_tests::grouped", mutates_args=())
def grouped(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply each group of rows, which ends at a number in ``ends``, by a matrix of its own."""
    result, start = x.new_zeros(x.shape[0], weight.shape[2]), 0
    for matrix, end in zip(weight, ends.tolist(), strict=True):
        result[start:end] = x[start:end] @ matrix
        start = end
    return result


@grouped.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    x, weight, ends = ctx.saved_tensors
    of_x, of_weight, start = torch.zeros_like(x), torch.zeros_like(weight), 0
    for number, end in enumerate(ends.tolist()):
        of_x[start:end] = gradient[start:end] @ weight[number].T
        of_weight[number] = x[start:end].T @ gradient[start:end]
        start = end
    return of_x, of_weight, None


grouped.register_autograd(_backward, setup_context=_keep)


class Experts(nn.Module):
    def __init__(self, *, by_name: bool) -> None:
        super().__init__()
        self.by_name = by_name
        self.gate, self.weight = nn.Linear(8, 4), nn.Parameter(torch.randn(4, 8, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        expert = self.gate(x).argmax(-1)
        order = expert.argsort(stable=True)
        ends = torch.histc(expert.to(x.dtype), 4, 0, 3).long().cumsum(0)
        if self.by_name:
            return torch.ops.tvmbridge_tests.grouped(x[order], self.weight, ends=ends).sin()
        return grouped(x[order], self.weight, ends).sin()


@pytest.mark.parametrize("by_name", [False, True])
def test_groups_of_changing_sizes(by_name: bool) -> None:
    torch.manual_seed(0)
    eager = Experts(by_name=by_name).double()
    tvm = copy.deepcopy(eager)
    sample = torch.randn(16, 8, dtype=torch.double)
    add_tvm_dispatch(tvm, sample, options={"only_if_faster": False})
    for _ in range(3):
        x = torch.randn(16, 8, dtype=torch.double)
        found = []
        for module in (tvm, eager):
            given = x.clone().requires_grad_()
            output = module(given)
            gradients = torch.autograd.grad(output.pow(2).sum(), [given, module.weight])
            found.append([output.detach(), *gradients])
        torch.testing.assert_close(*found)
    report = dispatch_report(tvm)
    assert report.tvm_calls == 3, report.fallbacks
