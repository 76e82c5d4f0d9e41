"""Emulated row-wise kernels: a row for a part of a warp, a warp, a block, or several blocks."""

from __future__ import annotations

import torch
from torch.nn import functional
from tvm import relax
from tvm.relax import op

from tests.schedules.gpu.emulator import run_each

# Not a multiple of the rows of one block.
ROWS = 7
NEAR = {"rtol": 3e-6, "atol": 3e-6}


def test_softmax_and_norms() -> None:
    cases = []
    for columns in (1, 3, 20, 32, 33, 200, 256, 257, 768, 1000, 5000):
        cases.append((torch.randn(ROWS, columns), torch.randn(columns), torch.randn(columns)))

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

    for (x, weight, bias), results in zip(cases, run_each(graph, *cases), strict=True):
        d = x.double()
        norm = functional.layer_norm(d, x.shape[1:], weight.double(), bias.double(), 1e-3)
        exact = [
            (d + bias).softmax(-1),
            (d * weight).log_softmax(-1),
            norm.tanh(),
            (d.var(-1, correction=0, keepdim=True) + 1e-3).rsqrt(),
            d - d.mean(-1, keepdim=True),
        ]
        for result, wanted in zip(results, exact, strict=True):
            torch.testing.assert_close(result.double(), wanted, **NEAR)


def test_values_of_other_columns() -> None:
    cases = [[torch.randn(ROWS, columns)] for columns in (1, 3, 33, 128, 257, 1000)]

    def graph(v: relax.Expr) -> list[relax.Expr]:
        columns = int(v.ty.shape[1])
        s = op.nn.softmax(v, -1)
        turned = op.multiply(op.add(s, op.flip(s, 1)), op.sum(s, -1, keepdims=True))
        parts = [op.strided_slice(s, [1], [columns - 1], [columns])]
        if columns > 1:
            parts.append(op.strided_slice(s, [1], [0], [columns - 1]))
        shifted = op.subtract(s, op.concat(parts, 1))
        return [turned, op.divide(shifted, op.max(s, -1, keepdims=True))]

    for (x,), results in zip(cases, run_each(graph, *cases), strict=True):
        s = x.double().softmax(-1)
        exact = [(s + s.flip(1)) * s.sum(-1, keepdim=True)]
        exact.append((s - s.roll(1, 1)) / s.amax(-1, keepdim=True))
        for result, wanted in zip(results, exact, strict=True):
            torch.testing.assert_close(result.double(), wanted, **NEAR)


def test_several_reductions_in_one_pass_use_no_memory_twice() -> None:
    """Check that a reduction does not overwrite shared memory that is still to be read."""
    cases = [[torch.randn(ROWS, columns, dtype=torch.float64)] for columns in (20, 33, 300, 1000)]

    def graph(v: relax.Expr) -> relax.Expr:
        for _ in range(3):
            low, high = op.min(v, -1, keepdims=True), op.max(v, -1, keepdims=True)
            v = op.divide(op.subtract(v, op.mean(v, -1, keepdims=True)), op.subtract(high, low))
        return op.multiply(v, op.prod(op.tanh(op.add(v, v)), -1, keepdims=True))

    for (v,), (result,) in zip(cases, run_each(graph, *cases), strict=True):
        for _ in range(3):
            v = (v - v.mean(-1, keepdim=True)) / (v.amax(-1, True) - v.amin(-1, True))
        exact = v * (v + v).tanh().prod(-1, keepdim=True)
        torch.testing.assert_close(result, exact, rtol=1e-11, atol=1e-300)


def test_halves() -> None:
    dtypes = (torch.bfloat16, torch.float16)
    cases = [[torch.randn(ROWS, n).to(dtype)] for n in (33, 768) for dtype in dtypes]
    found = run_each(lambda v: [op.nn.softmax(v, -1), op.sum(v, -1)], *cases)
    for (x,), (result, total) in zip(cases, found, strict=True):
        unit = torch.finfo(x.dtype).eps
        torch.testing.assert_close(result.double(), x.double().softmax(-1), rtol=unit, atol=1e-7)
        # One rounding to the dtype, and float32 rounding errors of numbers that cancel.
        bound = 1e-6 * x.double().abs().sum(-1)
        off = (total.double() - x.double().sum(-1)).abs() - unit * x.double().sum(-1).abs()
        assert (off <= bound).all()
