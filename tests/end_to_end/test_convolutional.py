"""Convolutional networks train by the joint source ``relax``, and their states equal eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.joint_steps import assert_same, dispatched, step
from tests.thinned import thinned
from tvmbridge import dispatch_report


class Residual(nn.Module):
    """A stem, pooling, and a residual block of two convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, bias=False)
        self.first, self.second = nn.Conv2d(6, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.past = nn.Conv2d(6, 8, 1, 2)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (6, 8, 8, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(torch.relu(self.norms[0](self.stem(x))), 3, 2, 1)
        y = torch.relu(self.norms[1](self.first(x)))
        y = torch.relu(self.norms[2](self.second(y)) + self.norms[3](self.past(x)))
        return self.head(functional.adaptive_avg_pool2d(y, 1).flatten(1))


class Net(nn.Module):
    """A U-Net with a transposed convolution, both interpolations and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 4, 3, padding=1)
        self.deep = nn.Conv2d(4, 8, 3, padding=2, dilation=2, groups=2)
        self.up = nn.ConvTranspose2d(8, 4, 3, 2, 1, output_padding=1, groups=4)
        self.last = nn.Conv2d(16, 1, 1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = functional.silu(self.norm(self.down(x)))
        low = torch.tanh(self.deep(functional.avg_pool2d(high, 3, 2, 1)))
        wide = functional.interpolate(low[:, :4], scale_factor=2.0, mode="bilinear")
        tall = functional.interpolate(functional.adaptive_avg_pool2d(low, 3)[:, 4:], size=(8, 10))
        return self.last(torch.cat([high, self.up(low), wide, tall], 1))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual block": (Residual, (3, 3, 13, 11)),
    "down and up": (Net, (2, 2, 8, 10)),
}


@pytest.mark.parametrize("name", thinned(CASES, 2))
def test_training_is_eager_s(name: str) -> None:
    construct, shape = CASES[name]
    torch.manual_seed(3)
    eager, x = construct().double().train(), torch.randn(shape, dtype=torch.float64)
    ours, _ = dispatched(eager, (x,), "relax")
    for _ in range(4):
        assert_same(step(ours, (x,)), step(eager, (x,)), rtol=1e-8, atol=1e-10)
        _descend(ours)
        _descend(eager)
    assert (dispatch_report(ours).tvm_calls, dispatch_report(ours).fallbacks) == (4, {})


def _descend(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= 0.05 * parameter.grad
