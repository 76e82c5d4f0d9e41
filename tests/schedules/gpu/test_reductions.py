"""Emulated reductions over columns and long rows: several parts, tails, operators and dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from tvm import relax
from tvm.relax import op

from tests.schedules.gpu.emulator import run_each
from tests.thinned import but_slow

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
    ((133, 5000), 1),
    ((50_000,), 0),
]
_LARGE = 500_000


def _reduced(
    cases: Sequence[tuple[torch.Tensor, int]], make: Callable[[relax.Expr, int], list[relax.Expr]]
) -> list[list[torch.Tensor]]:
    """Return the results of ``make`` on each tensor and axis, all compiled as one module."""
    axes = iter([axis for _, axis in cases])
    return run_each(lambda v: make(v, next(axes)), *([x] for x, _ in cases))


def test_sums_and_extremes() -> None:
    cases = [(torch.randn(shape), axis) for shape, axis in CASES]

    def graph(v: relax.Expr, axis: int) -> list[relax.Expr]:
        product = op.multiply(v, op.add(v, relax.const(1.0, "float32")))
        # Extremes combine parts as sums do; on large tensors their emulation takes seconds.
        small = math.prod(int(size) for size in v.ty.shape) < _LARGE
        return [reduce(product, axis) for reduce in (op.sum, *[op.max, op.min] * small)]

    for (x, axis), (total, *extremes) in zip(cases, _reduced(cases, graph), strict=True):
        product, case = x * (x + 1), f"{tuple(x.shape)}, {axis}"
        for found, wanted in zip(extremes, (product.amax(axis), product.amin(axis)), strict=False):
            assert torch.equal(found, wanted), case
        assert bool(extremes) is (x.numel() < _LARGE)
        # A thread adds few numbers in sequence, so the error is at most eight roundings.
        bound = 8 * torch.finfo(torch.float32).eps * product.abs().double().sum(axis)
        assert ((total.double() - product.double().sum(axis)).abs() <= bound).all(), case


@pytest.mark.parametrize(
    "dtype", but_slow(["float64", "bfloat16", "float16", "int64"], "float64", "float16")
)
def test_dtypes(dtype: str) -> None:
    cases = []
    for shape, axis in (((1500, 70), 0), ((3, 40_003), 1)):
        x = torch.randn(shape) if "float" in dtype else torch.randint(-1000, 1000, shape)
        cases.append((x.to(getattr(torch, dtype)), axis))
    found = _reduced(cases, lambda v, axis: [f(v, axis) for f in (op.sum, op.max, op.min)])
    for (x, axis), (total, high, low) in zip(cases, found, strict=True):
        assert torch.equal(high, x.amax(axis))
        assert torch.equal(low, x.amin(axis))
        if "int" in dtype:
            assert torch.equal(total, x.sum(axis, dtype=x.dtype))
            continue
        exact, size = x.double().sum(axis), x.double().abs().sum(axis)
        unit = torch.finfo(x.dtype).eps
        halves = x.element_size() == 2
        # Half-precision numbers are summed in float32 and rounded once.
        bound = unit * exact.abs() + 8e-7 * size if halves else 8 * unit * size
        assert ((total.double() - exact).abs() <= bound).all()


def test_stages_after_long_rows_read_each_other() -> None:
    """Check stages that are computed with a reduction's results, and that other stages read."""
    cases = [[(torch.randn(2, 16_400) + 1).to(d)] for d in (torch.bfloat16, torch.float32)]

    def graph(v: relax.Expr) -> list[relax.Expr]:
        total = op.sum(op.tanh(v), -1, keepdims=True)
        high, low = op.max(v, -1, keepdims=True), op.min(v, -1, keepdims=True)
        span = op.exp(op.subtract(low, high))
        return [
            op.multiply(op.nn.softmax(v, -1), high),
            op.multiply(op.nn.log_softmax(v, -1), total),
            op.add(op.multiply(v, span), op.multiply(span, span)),
            op.subtract(op.sum(op.multiply(v, span), -1, keepdims=True), span),
        ]

    for (x,), results in zip(cases, run_each(graph, *cases), strict=True):
        d, unit = x.double(), torch.finfo(x.dtype).eps
        high, span = d.amax(-1, True), (d.amin(-1, True) - d.amax(-1, True)).exp()
        exact = [d.softmax(-1) * high, d.log_softmax(-1) * d.tanh().sum(-1, True)]
        exact += [d * span + span**2, (d * span).sum(-1, True) - span]
        for result, wanted in zip(results, exact, strict=True):
            error = (result.double() - wanted).norm() / wanted.norm()
            assert error < 4 * unit, (x.dtype, x.shape, float(error))


SHAPES = [((1500, 70), 0), ((3, 40_003), 1), ((9, 300), 1)]


def test_products_of_powers_of_two_are_exact() -> None:
    cases = [(2.0 ** torch.randint(-1, 2, shape).double(), axis) for shape, axis in SHAPES]
    found = _reduced(cases, lambda v, axis: [op.prod(v, axis)])
    for (x, axis), (result,) in zip(cases, found, strict=True):
        assert torch.equal(result, 2.0 ** x.log2().sum(axis))


def test_nan_comes_through() -> None:
    cases = [(torch.randn(shape), axis) for shape, axis in SHAPES]
    for x, _ in cases:
        x[-1, -1] = torch.nan
    found = _reduced(cases, lambda v, axis: [op.max(v, axis), op.min(v, axis)])
    for (x, axis), (high, low) in zip(cases, found, strict=True):
        torch.testing.assert_close(high, x.amax(axis), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(low, x.amin(axis), rtol=0, atol=0, equal_nan=True)
