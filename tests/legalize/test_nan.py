"""maximum, minimum, clip, relu, max and min keep NaN, in every dtype."""

from __future__ import annotations

import math

import pytest
import torch
from tvm.relax import op

from tests.legalize.compiled import run, run_all
from tests.thinned import thinned

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
A = [1.0, math.nan, 2.0, math.nan, -math.inf, math.inf, 0.5, -3.0] * 5
B = [math.nan, 1.0, 3.0, math.nan, math.inf, math.nan, -0.5, 4.0] * 5


def same(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equality, NaN included."""
    torch.testing.assert_close(result, expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", thinned(DTYPES, 2))
def test_floats(dtype: torch.dtype) -> None:
    a, b = torch.tensor(A, dtype=dtype), torch.tensor(B, dtype=dtype)
    rows = a.reshape(8, 5)
    expected = {
        (op.maximum, a, b): torch.maximum(a, b),
        (op.minimum, a, b): torch.minimum(a, b),
        (op.nn.relu, a): torch.relu(a),
        (lambda x: op.clip(x, -1, 2), a): a.clamp(-1, 2),
        (lambda x: op.clip(x, -math.inf, 2), a): a.clamp(max=2),
        (lambda x: op.max(x, 0), rows): rows.amax(0),
        (lambda x: op.max(x, 1), rows): rows.amax(1),
        (lambda x: op.min(x, 0), rows): rows.amin(0),
        (lambda x: op.min(x, 1), rows): rows.amin(1),
    }
    for result, wanted in zip(run_all(*expected), expected.values(), strict=True):
        same(result, wanted)


def test_integers() -> None:
    a, byte = torch.arange(-20, 20, dtype=torch.int32), torch.arange(40, dtype=torch.uint8)
    b = a.flip(0)
    expected = {
        (op.maximum, a, b): torch.maximum(a, b),
        (lambda x: op.clip(x, -3, 5), a): a.clamp(-3, 5),
        (lambda x: op.max(x), a): a.amax(),
        (lambda x: op.clip(x, 3, 300), byte): byte.clamp(min=3),
    }
    for result, wanted in zip(run_all(*expected), expected.values(), strict=True):
        same(result, wanted)


def test_broadcast() -> None:
    a, b = torch.randn(5, 1, 7), torch.randn(3, 1)
    same(run(op.maximum, a, b), torch.maximum(a, b))


def test_vectors_of_nan_do_not_fold() -> None:
    x = torch.full((64,), math.nan)
    assert run(lambda v: op.subtract(op.exp(v), op.tanh(v)), x).isnan().all()
    big = torch.full((64,), math.inf)
    assert run(lambda v: op.subtract(op.exp(v), op.exp(v)), big).isnan().all()
