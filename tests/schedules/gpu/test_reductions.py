"""Emulated reductions over columns and long rows: several parts, tails, operators and dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tvm import relax
from tvm.relax import op

from tests.schedules.gpu.emulator import run_all

# Shapes and axes: over columns and over rows, in one part and several, with and without tails.
CASES: list[tuple[tuple[int, ...], int]] = [
    ((4000, 300), 0),
    ((4096, 64), 0),
    ((70, 33), 0),
    ((5, 700), 0),
    ((3, 1001, 31), 1),
    ((9000, 3), 0),
    ((3, 100_003), 1),
    ((1, 1 << 16), 1),
    ((200, 6000), 1),
    ((50_000,), 0),
]


def _ids(case: Any) -> str:
    return f"{case[0]}-{case[1]}".replace(" ", "")


@pytest.mark.parametrize("case", CASES, ids=_ids)
def test_sums_and_extremes(case: tuple[tuple[int, ...], int]) -> None:
    shape, axis = case
    x = torch.randn(shape)

    def graph(v: relax.Expr) -> list[relax.Expr]:
        product = op.multiply(v, op.add(v, relax.const(1.0, "float32")))
        reductions = op.sum, op.max, op.min
        return [reduce(product, axis) for reduce in reductions]

    total, high, low = run_all(graph, x)
    product = x * (x + 1)
    assert torch.equal(high, product.amax(axis))
    assert torch.equal(low, product.amin(axis))
    # A thread adds few numbers in sequence, so the error is at most eight roundings.
    bound = 8 * torch.finfo(torch.float32).eps * product.abs().double().sum(axis)
    assert ((total.double() - product.double().sum(axis)).abs() <= bound).all()


@pytest.mark.parametrize(
    "dtype",
    [
        "float64",
        "bfloat16",
        *(pytest.param(d, marks=pytest.mark.slow) for d in ("int64", "int32", "float16")),
    ],
)
@pytest.mark.parametrize(("shape", "axis"), [((1500, 70), 0), ((3, 40_003), 1)])
def test_dtypes(dtype: str, shape: tuple[int, ...], axis: int) -> None:
    x = torch.randn(shape) if "float" in dtype else torch.randint(-1000, 1000, shape)
    x = x.to(getattr(torch, dtype))
    total, high, low = run_all(lambda v: [f(v, axis) for f in (op.sum, op.max, op.min)], x)
    assert torch.equal(high, x.amax(axis))
    assert torch.equal(low, x.amin(axis))
    if "int" in dtype:
        assert torch.equal(total, x.sum(axis, dtype=x.dtype))
        return
    exact, size = x.double().sum(axis), x.double().abs().sum(axis)
    unit = torch.finfo(x.dtype).eps
    halves = x.element_size() == 2
    # Half-precision numbers are summed in float32 and rounded once.
    bound = unit * exact.abs() + 8e-7 * size if halves else 8 * unit * size
    assert ((total.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(("shape", "axis"), [((1500, 70), 0), ((3, 40_003), 1), ((9, 300), 1)])
def test_products_of_powers_of_two_are_exact(shape: tuple[int, ...], axis: int) -> None:
    x = 2.0 ** torch.randint(-1, 2, shape).double()
    (result,) = run_all(lambda v: op.prod(v, axis), x)
    assert torch.equal(result, 2.0 ** x.log2().sum(axis))


@pytest.mark.parametrize(("shape", "axis"), [((1500, 70), 0), ((3, 40_003), 1), ((9, 300), 1)])
def test_nan_comes_through(shape: tuple[int, ...], axis: int) -> None:
    x = torch.randn(shape)
    x[shape[0] - 1, shape[1] - 1] = torch.nan
    high, low = run_all(lambda v: [op.max(v, axis), op.min(v, axis)], x)
    torch.testing.assert_close(high, x.amax(axis), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(low, x.amin(axis), rtol=0, atol=0, equal_nan=True)
