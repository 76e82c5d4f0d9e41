"""Scattered sums of half-precision numbers: summed in float32, rounded once, if eager does so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tvmbridge
from tests.frontend.helpers import Function
from tests.thinned import thinned

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
def test_sums_are_rounded_once(dtype: torch.dtype) -> None:
    x, i = _inputs(dtype)
    module = Function(lambda x, i: [summed(x, i) for summed in FORWARD.values()])
    with torch.no_grad():
        tvmbridge.add_tvm_dispatch(module, (x, i))
        results = module(x, i)
    assert tvmbridge.dispatch_report(module).fallbacks == {}
    for (name, summed), ours in zip(FORWARD.items(), results, strict=True):
        exact = summed(x.double(), i)
        assert ours.dtype is dtype
        assert _off(ours, exact) <= 1.5 * _off(summed(x, i), exact), name


def _gradient(summed: Places, x: torch.Tensor, i: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the gradient of ``x``; the cotangent is rounded to ``dtype``."""
    return torch.autograd.grad(result := summed(x, i), x, _cotangent(result, dtype))[0]


def _cotangent(result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cotangent = torch.rand(result.shape, generator=torch.Generator().manual_seed(1))
    return cotangent.to(dtype).to(result.dtype)


@pytest.mark.parametrize("dtype", thinned([torch.float16, torch.bfloat16], 2), ids=str)
def test_gradients_are_rounded_once(dtype: torch.dtype) -> None:
    x, i = _inputs(dtype)
    module = Function(lambda *t: [f(y, t[-1]) for f, y in zip(GRADIENTS.values(), t, strict=False)])
    leaves = [x.clone().requires_grad_() for _ in GRADIENTS]
    tvmbridge.add_tvm_dispatch(module, (*leaves, i))
    results = module(*leaves, i)
    found = torch.autograd.grad(results, leaves, [_cotangent(r, dtype) for r in results])
    assert tvmbridge.dispatch_report(module).fallbacks == {}
    for (name, summed), ours in zip(GRADIENTS.items(), found, strict=True):
        exact = _gradient(summed, x.double().requires_grad_(), i, dtype)
        eager = _gradient(summed, x.clone().requires_grad_(), i, dtype)
        assert _off(ours, exact) <= 1.5 * _off(eager, exact), name


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
