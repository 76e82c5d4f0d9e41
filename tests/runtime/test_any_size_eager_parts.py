"""Code for any size of modules of which PyTorch runs a part: data-dependent results, and draws."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.core.errors import BuildError


class Masked(nn.Module):
    """The large elements of a product: all, as many as half of the rows, and one for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x).tanh()
        rows, large = x.shape[0], y[y > 0]
        halved = large[: rows // 2], large[:rows].view(-1, 1)
        return y.softmax(-1), large * 2, (y.sum(-1) > 0).nonzero(), *halved


class Drawn(nn.Module):
    """Draws from probabilities that the module computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chances = self.linear(x).sigmoid()
        return torch.bernoulli(chances.detach()) * chances, chances.log()


class Irregular(nn.Module):
    """Of the positive elements, as many as a remainder of the cube of the rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        return y[y > 0][: x.shape[0] ** 3 % 17 + 1]


def _results(module: nn.Module, x: torch.Tensor) -> list[Any]:
    torch.manual_seed(1)
    found = list(module(x))
    loss = torch.stack([r.sum() for r in found if r.requires_grad]).sum()
    return [*(r.detach() for r in found), *torch.autograd.grad(loss, [*module.parameters()])]


@pytest.mark.parametrize("kind", [Masked, Drawn])
def test_parts_that_pytorch_runs_serve_all_sizes(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module = kind()
    plain = copy.deepcopy(module)
    add_tvm_dispatch(module, dynamic_shapes="auto", on_fallback="silent")
    for rows in (8, 11, 5, 30, 13):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(_results(module, x), _results(plain, x))
    report = dispatch_report(module)
    assert report.tvm_calls == 5, report.fallbacks


def test_a_part_whose_numbers_are_no_sizes_is_refused() -> None:
    with pytest.raises(BuildError, match=r"module.eager.*is \("):
        add_tvm_dispatch(Irregular().eval(), torch.randn(20, 4), dynamic_shapes=({0: Dim("rows")},))
