"""Sums and other reductions: dtypes, precision, axes."""

from __future__ import annotations

import itertools

import pytest
import torch
from tvm.relax import op

from tests.legalize.compiled import run, run_all
from tests.thinned import thinned

KINDS = {
    "sum": (op.sum, lambda x, a, k: x.sum(a, keepdim=k)),
    "mean": (op.mean, lambda x, a, k: x.mean(a, keepdim=k)),
    "variance": (op.variance, lambda x, a, k: x.var(a, correction=0, keepdim=k)),
    "max": (op.max, lambda x, a, k: x.amax(a, keepdim=k)),
    "min": (op.min, lambda x, a, k: x.amin(a, keepdim=k)),
}
AXES = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)]


@pytest.mark.parametrize("kind", thinned(KINDS, 2))
def test_all_axes(kind: str) -> None:
    graph, reference = KINDS[kind]
    x = torch.randn(7, 13, 33)
    cases = list(zip(AXES, itertools.cycle((False, True)), strict=False))
    calls = ((lambda v, a=axes, k=keep: graph(v, list(a), keepdims=k), x) for axes, keep in cases)
    for (axes, keep), result in zip(cases, run_all(*calls), strict=True):
        exact = reference(x.double(), axes, keep)
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=2e-5)


def test_prod() -> None:
    x = torch.rand(9, 21) + 0.5
    results = run_all((lambda v: op.prod(v, 0), x), (lambda v: op.prod(v, 1), x))
    torch.testing.assert_close(results, [x.prod(0), x.prod(1)], rtol=1e-5, atol=0)


def test_halves_accumulate_in_float32() -> None:
    given = [torch.ones(300, 200, dtype=dtype) / 4 for dtype in (torch.float16, torch.bfloat16)]
    cases = list(itertools.product(given, ([0], [1], None)))
    results = run_all(*((lambda v, a=axes: op.sum(v, a), x) for x, axes in cases))
    for (x, axes), result in zip(cases, results, strict=True):
        expected = x.float().sum(axes) if axes else x.float().sum()
        torch.testing.assert_close(result, expected.to(x.dtype), rtol=0, atol=0)


def test_a_long_float32_sum_is_exact() -> None:
    assert run(op.sum, torch.ones(2**25)).item() == 2**25


def test_long_sums_keep_precision() -> None:
    down, along = torch.rand(200_003, 3), torch.rand(3, 200_003)
    results = run_all((lambda v: op.sum(v, 0), down), (lambda v: op.sum(v, 1), along))
    for exact, result in zip((down.double().sum(0), along.double().sum(1)), results, strict=True):
        assert ((result.double() - exact).abs() / exact).max() < 1e-6


def test_integers_keep_their_dtype() -> None:
    given = [torch.arange(1000, dtype=t).reshape(10, 100) for t in (torch.int32, torch.int64)]
    cases = list(itertools.product(given, ([0], [1], [0, 1])))
    results = run_all(*((lambda v, a=axes: op.sum(v, a), x) for x, axes in cases))
    for (x, axes), result in zip(cases, results, strict=True):
        torch.testing.assert_close(result, x.sum(axes, dtype=x.dtype), rtol=0, atol=0)


def test_float64() -> None:
    x = torch.randn(50, 77, dtype=torch.float64)
    torch.testing.assert_close(run(lambda v: op.sum(v, 1), x), x.sum(1), rtol=1e-14, atol=1e-14)
