"""Attention: half precision is as accurate as in eager PyTorch; gradients of fully masked rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import tvmbridge
from tests.thinned import thinned

SHAPES = {"heads": (2, 4, 16, 32), "no heads": (4, 16, 32)}


class Attention(nn.Module):
    """Attention with a floating or boolean mask, or a causal one."""

    def __init__(self, dropout_p: float = 0.0, *, is_causal: bool = False) -> None:
        super().__init__()
        self.dropout_p, self.is_causal = dropout_p, is_causal

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: torch.Tensor
    ) -> torch.Tensor:
        return scaled_dot_product_attention(
            q, k, v, *mask, dropout_p=self.dropout_p, is_causal=self.is_causal
        )


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, mask: str) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    tensors = tuple((2 * torch.randn(shape)).to(dtype) for _ in range(3))
    if mask == "added":
        return (*tensors, torch.randn(shape[-2], shape[-2]).to(dtype))
    return (*tensors, torch.rand(shape[-2], shape[-2]) > 0.3) if mask == "bool" else tensors


# Each value of each choice occurs.
HALVES = [
    (torch.float16, "heads", True, "none"),
    (torch.float16, "no heads", False, "added"),
    (torch.bfloat16, "heads", False, "bool"),
    (torch.bfloat16, "no heads", True, "causal"),
    (torch.bfloat16, "heads", True, "added"),
]


@pytest.mark.parametrize(("dtype", "shape", "grad_mode", "mask"), thinned(HALVES, 2))
def test_half_precision_rounds_the_result_alone(
    dtype: torch.dtype, shape: str, grad_mode: bool, mask: str
) -> None:
    module = Attention(is_causal=mask == "causal")
    inputs = _inputs(SHAPES[shape], dtype, mask)
    exact = module(*(t.double() if t.is_floating_point() else t for t in inputs))
    eager = module(*inputs)
    with torch.set_grad_enabled(grad_mode):
        tvmbridge.add_tvm_dispatch(module, inputs)
        ours = module(*inputs)
    assert tvmbridge.dispatch_report(module).fallbacks == {}
    assert ours.dtype == dtype
    assert _off(ours, exact) <= 1.5 * _off(eager, exact)


def _off(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact).abs().max())


def test_scores_beyond_float16_do_not_overflow() -> None:
    module = Attention(0.5)
    q, k, v = _inputs(SHAPES["no heads"], torch.float16, "none")
    torch.manual_seed(1)
    expected = module(1e3 * q, 1e3 * k, v)
    tvmbridge.add_tvm_dispatch(module, (q, k, v))
    torch.manual_seed(1)
    found = module(1e3 * q, 1e3 * k, v)
    assert tvmbridge.dispatch_report(module).fallbacks == {}
    torch.testing.assert_close(found, expected)


def _closed_by(lowest: float, kind: str) -> torch.Tensor:
    """Return a mask that masks one row completely, and the ends of all other rows."""
    closed = torch.zeros(16, 16, dtype=torch.bool)
    closed[:, 12:] = closed[3] = True
    return ~closed if kind == "bool" else torch.where(closed, lowest, 0.0).double()


@pytest.mark.parametrize(
    ("lowest", "kind", "joint"),
    [
        (torch.finfo(torch.float32).min, "added", "aot"),
        (-1e9, "added", "aot"),
        (-torch.inf, "added", "aot"),
        (-torch.inf, "bool", "relax"),
    ],
)
def test_gradients_of_closed_rows_are_those_of_eager(lowest: float, kind: str, joint: str) -> None:
    inputs = [torch.randn(2, 4, 16, 32, dtype=torch.float64, requires_grad=True) for _ in "qkv"]
    sample = (*inputs, _closed_by(lowest, kind))
    module = Attention()
    expected = torch.autograd.grad(module(*sample).square().sum(), inputs)
    tvmbridge.add_tvm_dispatch(module, sample)
    found = torch.autograd.grad(module(*sample).square().sum(), inputs)
    report = tvmbridge.dispatch_report(module)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert report.fallbacks == {}
    assert report.specializations[0].joint == joint
