"""Arithmetic that a simplifier of real numbers would rearrange: native code equals eager's bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.frontend.helpers import run, special
from tests.thinned import thinned

Results = tuple[torch.Tensor, ...]


def with_zero(x: torch.Tensor) -> Results:
    zeros = torch.zeros_like(x)
    return x * 0, -0.0 * x, 0 / x, zeros * x, zeros / x, x * 0 + x, functional.leaky_relu(x, 0.0)


def with_itself(x: torch.Tensor) -> Results:
    twice = torch.sub(x, x, alpha=1)
    return x - x, x - x.clone(), (x + 1) - (x + 1), x.exp() - x.exp(), twice, (x - x) * 0, x / x


def with_several_numbers(x: torch.Tensor) -> Results:
    shifted = (x[1:] + 0.1).view(3, 5) + 0.2
    return (x + 1e8) - 1e8, (x + 1) + 1e-8 - 1, (x - 3e38) + 3e38, shifted, 1 - (1 - x), (x * 3) / 3


@pytest.mark.parametrize("dtype", thinned([torch.float32, torch.float64], 2))
def test_every_bit_is_eager_s(dtype: torch.dtype) -> None:
    functions: list[Callable[[torch.Tensor], Results]]
    functions = [with_zero, with_itself, with_several_numbers]
    inputs = [special(dtype) for _ in functions]
    results, report = run(
        lambda *tensors: [f(x) for f, x in zip(functions, tensors, strict=True)], *inputs
    )
    assert not report.aten_calls
    for function, x, found in zip(functions, inputs, results, strict=True):
        for ours, theirs in zip(found, function(x), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
            finite = ~theirs.isnan()
            assert torch.equal(ours[finite].signbit(), theirs[finite].signbit())
