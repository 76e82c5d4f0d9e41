"""Half precision by converters for float32: results equal eager PyTorch's bit by bit."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.frontend.helpers import Function
from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch, dispatch_report

_CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    # 0.1 is no half-precision number, and PyTorch does not round it to one.
    "numbers": lambda x: x * 0.1 / 0.7,
    "rounded between operators": lambda x: (x * 3.3 + x) * x - x.abs(),
    "functions": lambda x: torch.tanh(functional.gelu(x)) + torch.sigmoid(x).sqrt(),
    "choices": lambda x: torch.where(x >= 0.25, torch.tanh(x), -x).masked_fill(x >= 1.3, 0.3),
    "casts": lambda x: (x.float() * 1.7).to(x.dtype) + x.double().sin().to(x.dtype),
    "creation": lambda x: torch.full_like(x, 0.1) * x + torch.ones_like(x),
}


@pytest.mark.parametrize(
    ("case", "dtype"), thinned(itertools.product(_CASES, [torch.bfloat16, torch.float16]), 3)
)
def test_bits_are_those_of_eager(case: str, dtype: torch.dtype) -> None:
    module = Function(_CASES[case])
    x = (torch.randn(37, 19, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)
    with torch.no_grad():
        expected = module(x)
        add_tvm_dispatch(module, x)
        found = module(x)
    assert found.dtype is dtype
    # TVM's and PyTorch's functions differ in the last bit of float32, which rarely changes a half.
    differing = int((found != expected).sum())
    assert differing <= (2 if case in ("functions", "choices", "casts") else 0)
    report = dispatch_report(module)
    assert report.aten_calls == []
    assert report.fallbacks == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reductions_are_rounded_once(dtype: torch.dtype) -> None:
    def reduced(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(), x.mean(0), x.amax(1), x.var(1)

    module = Function(reduced)
    x = torch.randn(300, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        exact = reduced(x.double())
        add_tvm_dispatch(module, x)
        for found, value in zip(module(x), exact, strict=True):
            unit = torch.finfo(dtype).eps * value.abs().clamp_min(torch.finfo(dtype).tiny)
            assert bool(((found.double() - value).abs() <= 0.51 * unit + 1e-5).all())


def test_products_round_once_with_their_bias() -> None:
    module, x = torch.nn.Linear(64, 48).bfloat16(), torch.randn(5, 64).bfloat16()
    with torch.no_grad():
        exact = copy.deepcopy(module).double()(x.double())
        add_tvm_dispatch(module, x)
        unit = torch.finfo(torch.bfloat16).eps * exact.abs()
        assert bool(((module(x).double() - exact).abs() <= 0.51 * unit + 1e-5).all())
    assert dispatch_report(module).aten_calls == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_value_in_all_lanes(dtype: torch.dtype) -> None:
    module, x = Function(lambda x: x.mean()), torch.randn(3, 64).to(dtype).requires_grad_()
    add_tvm_dispatch(module, x, options={"joint": "aot"})
    module(x).backward()
    assert torch.equal(x.grad, torch.full_like(x, float((1 / torch.tensor(192.0)).to(dtype))))  # type: ignore[arg-type]
