"""Emulated kernels of several results: a residual sum and the norms that read it are one kernel."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import tvmbridge
from tests.gpu.helpers import errors
from tvmbridge import CompileOptions


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer_norm, self.rms_norm = nn.LayerNorm(width), nn.RMSNorm(width)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both = x + torch.tanh(y)
        return both, self.layer_norm(both), self.rms_norm(both)


def _launches(kernels: list[Any]) -> int:
    return sum(len(lowered.launches) for lowered in kernels)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        pytest.param(torch.bfloat16, (2, 5, 7), marks=pytest.mark.slow),
        (torch.bfloat16, (1, 3, 520)),
        (torch.float16, (3, 1, 72)),
        (torch.float32, (129, 33)),
        pytest.param(torch.float16, (2, 1024), marks=pytest.mark.slow),
        pytest.param(torch.float32, (2200, 96), marks=pytest.mark.slow),
    ],
    ids=str,
)
@torch.no_grad()
def test_residual_and_norms(dtype: torch.dtype, shape: tuple[int, ...], kernels: list[Any]) -> None:
    torch.manual_seed(0)
    eager = _Residual(shape[-1]).to(dtype).eval()
    ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    x, y = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    tvmbridge.add_tvm_dispatch(ours, (x, y))
    kernels.clear()
    found = ours(x, y)
    assert _launches(kernels) == 1
    truth, expected = exact(x.double(), y.double()), eager(x, y)
    for number, error in errors(_named(found), _named(truth)).items():
        bound = 2 * errors(_named(expected), _named(truth))[number]
        assert error <= bound + 0.05 * torch.finfo(dtype).eps, number


def _named(results: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    return {str(number): result for number, result in enumerate(results)}


def test_gradients_of_residual_and_norms(kernels: list[Any]) -> None:
    torch.manual_seed(0)
    module, x, y = _Residual(40), torch.randn(6, 3, 40), torch.randn(6, 3, 40)
    exact = copy.deepcopy(module).double()
    options = CompileOptions(joint="aot")
    inputs = [t.clone().requires_grad_() for t in (x, y)]
    wide = [t.double().requires_grad_() for t in (x, y)]
    tvmbridge.add_tvm_dispatch(module, tuple(inputs), options=options)
    kernels.clear()
    results, truths = module(*inputs), exact(*wide)
    assert _launches(kernels) == 1
    cotangents = [torch.randn_like(r) for r in results]
    leaves = [*inputs, *module.parameters()], [*wide, *exact.parameters()]
    found = torch.autograd.grad(results, leaves[0], cotangents)
    wanted = torch.autograd.grad(truths, leaves[1], [c.double() for c in cotangents])
    for ours, truth in zip((*results, *found), (*truths, *wanted), strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5)
    # The three sums of the norms' parameters go down columns, each in a kernel of its own.
    assert _launches(kernels) == 1 + 1 + 3


class _Sums(nn.Module):
    """Sums down columns and along a long row, rounded to half precision, scaled and reshaped."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        down = x.float().sum(0)
        total = x.float().sum()
        return (down * scale.float()).to(x.dtype).view(1, -1), (total / 3).to(x.dtype)


@pytest.mark.parametrize(
    "shape", [(70, 33), pytest.param((1200, 64), marks=pytest.mark.slow)], ids=str
)
@torch.no_grad()
def test_sums_are_rounded_where_they_are_computed(
    shape: tuple[int, ...], kernels: list[Any]
) -> None:
    torch.manual_seed(0)
    x, scale = torch.randn(shape).bfloat16(), torch.randn(shape[1]).bfloat16()
    module = _Sums().eval()
    tvmbridge.add_tvm_dispatch(module, (x, scale))
    kernels.clear()
    found, wanted = module(x, scale), _Sums()(x.double(), scale.double())
    # The parts of a reduction are combined by a second launch.
    assert _launches(kernels) <= 4
    for ours, truth in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=2**-7, atol=1e-3)


class _Differences(nn.Module):
    """Sums down columns, minus the same sums in reverse order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sums = x.sum(0)
        return sums - sums.flip(0)


@torch.no_grad()
def test_results_are_read_at_their_own_position_alone(kernels: list[Any]) -> None:
    x = torch.randn(40, 33)
    module = _Differences().eval()
    tvmbridge.add_tvm_dispatch(module, x)
    torch.testing.assert_close(module(x).double(), _Differences()(x.double()), rtol=0, atol=1e-4)
    assert kernels
