"""Sums and other reductions: dtypes, precision, axes."""

from __future__ import annotations

import itertools

import pytest
import torch
from tvm.relax import op

from tests.legalize.compiled import run
from tests.thinned import thinned

KINDS = {
    "sum": (op.sum, lambda x, a, k: x.sum(a, keepdim=k)),
    "mean": (op.mean, lambda x, a, k: x.mean(a, keepdim=k)),
    "variance": (op.variance, lambda x, a, k: x.var(a, correction=0, keepdim=k)),
    "max": (op.max, lambda x, a, k: x.amax(a, keepdim=k)),
    "min": (op.min, lambda x, a, k: x.amin(a, keepdim=k)),
}
AXES = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)]


@pytest.mark.parametrize(("axes", "kind"), thinned(itertools.product(AXES, KINDS), 2))
def test_all_axes(axes: tuple[int, ...], kind: str) -> None:
    graph, reference = KINDS[kind]
    x = torch.randn(7, 13, 33)
    for keep in (False, True):
        result = run(lambda v, k=keep: graph(v, list(axes), keepdims=k), x)
        torch.testing.assert_close(
            result.double(), reference(x.double(), axes, keep), rtol=1e-5, atol=2e-5
        )


@pytest.mark.parametrize("axis", [0, 1])
def test_prod(axis: int) -> None:
    x = torch.rand(9, 21) + 0.5
    torch.testing.assert_close(run(lambda v: op.prod(v, axis), x), x.prod(axis), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("axes", [[0], [1], None])
def test_halves_accumulate_in_float32(dtype: torch.dtype, axes: list[int] | None) -> None:
    x = torch.ones(300, 200, dtype=dtype) / 4
    result = run(lambda v: op.sum(v, axes), x)
    expected = x.float().sum(axes) if axes else x.float().sum()
    torch.testing.assert_close(result, expected.to(dtype), rtol=0, atol=0)


def test_a_long_float32_sum_is_exact() -> None:
    assert run(op.sum, torch.ones(2**25)).item() == 2**25


@pytest.mark.parametrize("axis", [0, 1])
def test_long_sums_keep_precision(axis: int) -> None:
    x = torch.rand((200_003, 3) if axis == 0 else (3, 200_003))
    exact = x.double().sum(axis)
    result = run(lambda v: op.sum(v, axis), x).double()
    assert ((result - exact).abs() / exact).max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_keep_their_dtype(dtype: torch.dtype) -> None:
    x = torch.arange(1000, dtype=dtype).reshape(10, 100)
    for axes in ([0], [1], [0, 1]):
        torch.testing.assert_close(
            run(lambda v, a=axes: op.sum(v, a), x), x.sum(axes, dtype=dtype), rtol=0, atol=0
        )


def test_float64() -> None:
    x = torch.randn(50, 77, dtype=torch.float64)
    torch.testing.assert_close(run(lambda v: op.sum(v, 1), x), x.sum(1), rtol=1e-14, atol=1e-14)
