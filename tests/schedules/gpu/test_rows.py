"""Emulated row-wise kernels: a row for a part of a warp, a warp, a block, or several blocks."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from tvm import relax
from tvm.relax import op

from tests.schedules.gpu.emulator import run_all

COLUMNS = [1, 3, 20, 32, 33, 200, 256, 257, 768, 1000, 5000]
# Not a multiple of the rows of one block.
ROWS = 7
NEAR = {"rtol": 3e-6, "atol": 3e-6}


@pytest.mark.parametrize("columns", COLUMNS)
def test_softmax_and_norms(columns: int) -> None:
    x, weight, bias = torch.randn(ROWS, columns), torch.randn(columns), torch.randn(columns)

    def graph(v: relax.Expr, w: relax.Expr, b: relax.Expr) -> list[relax.Expr]:
        centred = op.subtract(v, op.mean(v, -1, keepdims=True))
        variance = op.mean(op.multiply(centred, centred), -1, keepdims=True)
        inverse = op.rsqrt(op.add(variance, relax.const(1e-3, "float32")))
        scaled = op.add(op.multiply(op.multiply(centred, inverse), w), b)
        return [
            op.nn.softmax(op.add(v, b), -1),
            op.nn.log_softmax(op.multiply(v, w), -1),
            op.tanh(scaled),
            inverse,
            centred,
        ]

    results = run_all(graph, x, weight, bias)
    d = x.double()
    inverse = (d.var(-1, correction=0, keepdim=True) + 1e-3).rsqrt()
    exact = [
        (d + bias).softmax(-1),
        (d * weight).log_softmax(-1),
        functional.layer_norm(d, [columns], weight.double(), bias.double(), 1e-3).tanh(),
        inverse,
        d - d.mean(-1, keepdim=True),
    ]
    for result, wanted in zip(results, exact, strict=True):
        torch.testing.assert_close(result.double(), wanted, **NEAR)


@pytest.mark.parametrize("columns", [1, 3, 33, 128, 257, 1000])
def test_values_of_other_columns(columns: int) -> None:
    x = torch.randn(ROWS, columns)

    def graph(v: relax.Expr) -> list[relax.Expr]:
        s = op.nn.softmax(v, -1)
        turned = op.multiply(op.add(s, op.flip(s, 1)), op.sum(s, -1, keepdims=True))
        parts = [op.strided_slice(s, [1], [columns - 1], [columns])]
        if columns > 1:
            parts.append(op.strided_slice(s, [1], [0], [columns - 1]))
        shifted = op.subtract(s, op.concat(parts, 1))
        return [turned, op.divide(shifted, op.max(s, -1, keepdims=True))]

    results = run_all(graph, x)
    s = x.double().softmax(-1)
    exact = [(s + s.flip(1)) * s.sum(-1, keepdim=True)]
    exact.append((s - s.roll(1, 1)) / s.amax(-1, keepdim=True))
    for result, wanted in zip(results, exact, strict=True):
        torch.testing.assert_close(result.double(), wanted, **NEAR)


@pytest.mark.parametrize("columns", [20, 33, 300, 1000])
def test_several_reductions_in_one_pass_use_no_memory_twice(columns: int) -> None:
    """Check that a reduction does not overwrite shared memory that is still to be read."""
    x = torch.randn(ROWS, columns, dtype=torch.float64)

    def graph(v: relax.Expr) -> relax.Expr:
        for _ in range(3):
            low, high = op.min(v, -1, keepdims=True), op.max(v, -1, keepdims=True)
            v = op.divide(op.subtract(v, op.mean(v, -1, keepdims=True)), op.subtract(high, low))
        return op.multiply(v, op.prod(op.tanh(op.add(v, v)), -1, keepdims=True))

    (result,) = run_all(graph, x)
    v = x
    for _ in range(3):
        v = (v - v.mean(-1, keepdim=True)) / (v.amax(-1, True) - v.amin(-1, True))
    exact = v * (v + v).tanh().prod(-1, keepdim=True)
    torch.testing.assert_close(result, exact, rtol=1e-11, atol=1e-300)


@pytest.mark.parametrize("columns", [33, 768])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves(dtype: torch.dtype, columns: int) -> None:
    x = torch.randn(ROWS, columns).to(dtype)
    result, total = run_all(lambda v: [op.nn.softmax(v, -1), op.sum(v, -1)], x)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), x.double().softmax(-1), rtol=unit, atol=1e-7)
    # One rounding to the dtype, and float32 rounding errors of numbers that cancel.
    bound = 1e-6 * x.double().abs().sum(-1)
    off = (total.double() - x.double().sum(-1)).abs() - unit * x.double().sum(-1).abs()
    assert (off <= bound).all()
