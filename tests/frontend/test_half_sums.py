"""Scattered sums of half-precision numbers: summed in float32, rounded once, if eager does so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tvmbridge
from tests.frontend.helpers import Function

Places = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Functions of elements and of the indices where they are summed, along the last dimension.
FORWARD: dict[str, Places] = {
    "scatter_add": lambda x, i: x[:, :4].scatter_add(1, i, x),
    "scatter_reduce": lambda x, i: x[:, :4].scatter_reduce(1, i, x, "sum"),
    "index_add": lambda x, i: x[:, :4].index_add(1, i[0], x),
}
# Functions whose gradient is such a sum.
GRADIENTS: dict[str, Places] = {
    "cummax": lambda x, i: x.cummax(-1)[0],
    "gather": lambda x, i: x[:, :4].gather(1, i),
    "take_along_dim": lambda x, i: torch.take_along_dim(x[:, :4], i, 1),
    "index_select": lambda x, i: x[:, :4].index_select(1, i[0]),
}


def _inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(32, 1500, generator=generator).to(dtype)
    return x, torch.randint(4, x.shape, generator=generator)


def _off(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("summed", FORWARD.values(), ids=FORWARD)
def test_sums_are_rounded_once(summed: Places, dtype: torch.dtype) -> None:
    x, i = _inputs(dtype)
    module = Function(summed)
    with torch.no_grad():
        tvmbridge.add_tvm_dispatch(module, (x, i))
        ours = module(x, i)
    assert tvmbridge.dispatch_report(module).fallbacks == {}
    exact = summed(x.double(), i)
    assert ours.dtype is dtype
    assert _off(ours, exact) <= 1.5 * _off(summed(x, i), exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("summed", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_are_rounded_once(summed: Places, dtype: torch.dtype) -> None:
    x, i = _inputs(dtype)

    def gradient(function: Places, x: torch.Tensor) -> torch.Tensor:
        result = function(x.requires_grad_(), i)
        cotangent = torch.rand(result.shape, generator=torch.Generator().manual_seed(1))
        return torch.autograd.grad(result, x, cotangent.to(dtype).to(result.dtype))[0]

    module = Function(summed)
    tvmbridge.add_tvm_dispatch(module, (x.clone().requires_grad_(), i))
    ours = gradient(module, x.clone())
    assert tvmbridge.dispatch_report(module).fallbacks == {}
    exact = gradient(summed, x.double())
    assert _off(ours, exact) <= 1.5 * _off(gradient(summed, x.clone()), exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weight_norm_is_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    v, g = (torch.randn(64, n, generator=generator).to(dtype) for n in (256, 1))
    module = Function(torch._weight_norm)
    with torch.no_grad():
        tvmbridge.add_tvm_dispatch(module, (v, g))
        ours = module(v, g)
    assert tvmbridge.dispatch_report(module).fallbacks == {}
    exact = torch._weight_norm(v.double(), g.double())
    off, of_eager = ((y.double() - exact).abs().mean() for y in (ours, torch._weight_norm(v, g)))
    assert off <= 1.1 * of_eager
