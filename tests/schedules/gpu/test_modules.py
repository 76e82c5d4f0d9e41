"""Whole modules through emulated kernels: results and gradients equal float64 PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import tvmbridge
from tests.frontend.helpers import Function
from tests.gpu.blocks import Block, LlamaBlock
from tests.gpu.helpers import errors
from tests.thinned import but_slow, thinned


def _loss(x: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(x, torch.arange(x.shape[0]) % x.shape[1])


def _logic(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x > 0).any(0), (x > -2).all(-1), (x > 3).any(-1), (x.abs() < 4).all()


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer norm": (lambda: nn.LayerNorm(300), (37, 300)),
    "group norm": (lambda: nn.GroupNorm(4, 12), (3, 12, 9, 11)),
    "batch norm": (lambda: nn.BatchNorm2d(5), (4, 5, 17, 13)),
    "cross entropy": (lambda: Function(_loss), (77, 33)),
    "gelu": (lambda: nn.Sequential(nn.Linear(20, 70), nn.GELU(), nn.Linear(70, 3)), (33, 20)),
}


def _assert_learns_alike(module: nn.Module, x: torch.Tensor) -> None:
    exact = copy.deepcopy(module).double()
    x, wide = x.requires_grad_(), x.detach().double().requires_grad_()
    tvmbridge.add_tvm_dispatch(module, x)
    ours, wanted = module(x), exact(wide)
    torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=5e-6)
    cotangent = torch.randn_like(ours)
    gradients = torch.autograd.grad(ours, [x, *module.parameters()], cotangent)
    others = torch.autograd.grad(wanted, [wide, *exact.parameters()], cotangent.double())
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(gradient.double(), other, rtol=1e-4, atol=5e-5)
    assert tvmbridge.dispatch_report(module).fallbacks == {}


@pytest.mark.parametrize("name", thinned(MODULES, 2))
def test_forward_and_backward(name: str, kernels: list[Any]) -> None:
    make, shape = MODULES[name]
    _assert_learns_alike(make().train(), torch.randn(shape))
    assert kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "dtype"),
    but_slow([("gpt2", torch.bfloat16), ("llama", torch.float16)], ("llama", torch.float16)),
    ids=str,
)
def test_half_precision(block: str, dtype: torch.dtype, kernels: list[Any]) -> None:
    """Check that the error against float64 is at most twice eager PyTorch's."""
    torch.manual_seed(0)
    make = {"gpt2": lambda: Block(64, 4, causal=True), "llama": lambda: LlamaBlock(64, 4, 19)}
    eager, x = make[block]().to(dtype), torch.randn(2, 19, 64, dtype=dtype)
    exact, ours = copy.deepcopy(eager).double(), copy.deepcopy(eager)
    tvmbridge.add_tvm_dispatch(ours, x.clone().requires_grad_())
    found, expected, truth = (_learned(m, x) for m in (ours, eager, exact))
    assert len(kernels) > 20
    of_eager = errors(expected, truth)
    for name, error in errors(found, truth).items():
        assert error <= 2 * of_eager[name] + 0.01 * torch.finfo(dtype).eps, name


def _learned(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run forward and backward; return the output and all gradients."""
    x = x.detach().to(next(module.parameters()).dtype, copy=True).requires_grad_()
    output = module(x)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    output.backward(cotangent.bfloat16().to(output.dtype))
    assert x.grad is not None
    grads = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return {"output": output.detach(), "input": x.grad, **grads}


def test_any_and_all(kernels: list[Any]) -> None:
    x = torch.randn(2000, 70)
    module = Function(_logic)
    with torch.no_grad():
        tvmbridge.add_tvm_dispatch(module, x)
        for ours, wanted in zip(module(x), _logic(x), strict=True):
            assert torch.equal(ours, wanted)
    assert kernels
