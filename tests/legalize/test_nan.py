"""maximum, minimum, clip, relu, max and min keep NaN, in every dtype."""

from __future__ import annotations

import math

import pytest
import torch
from tvm.relax import op

from tests.legalize.compiled import run

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
A = [1.0, math.nan, 2.0, math.nan, -math.inf, math.inf, 0.5, -3.0] * 5
B = [math.nan, 1.0, 3.0, math.nan, math.inf, math.nan, -0.5, 4.0] * 5


def same(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equality, NaN included."""
    torch.testing.assert_close(result, expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_binary(dtype: torch.dtype) -> None:
    a, b = torch.tensor(A, dtype=dtype), torch.tensor(B, dtype=dtype)
    same(run(op.maximum, a, b), torch.maximum(a, b))
    same(run(op.minimum, a, b), torch.minimum(a, b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_unary(dtype: torch.dtype) -> None:
    a = torch.tensor(A, dtype=dtype)
    same(run(op.nn.relu, a), torch.relu(a))
    same(run(lambda x: op.clip(x, -1, 2), a), a.clamp(-1, 2))
    same(run(lambda x: op.clip(x, -math.inf, 2), a), a.clamp(max=2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, 1])
def test_reductions(dtype: torch.dtype, axis: int) -> None:
    a = torch.tensor(A, dtype=dtype).reshape(8, 5)
    same(run(lambda x: op.max(x, axis), a), a.amax(axis))
    same(run(lambda x: op.min(x, axis), a), a.amin(axis))


def test_integers() -> None:
    a = torch.arange(-20, 20, dtype=torch.int32)
    b = a.flip(0)
    same(run(op.maximum, a, b), torch.maximum(a, b))
    same(run(lambda x: op.clip(x, -3, 5), a), a.clamp(-3, 5))
    same(run(lambda x: op.max(x), a), a.amax())
    byte = torch.arange(40, dtype=torch.uint8)
    same(run(lambda x: op.clip(x, 3, 300), byte), byte.clamp(min=3))


def test_broadcast() -> None:
    a, b = torch.randn(5, 1, 7), torch.randn(3, 1)
    same(run(op.maximum, a, b), torch.maximum(a, b))


def test_vectors_of_nan_do_not_fold() -> None:
    x = torch.full((64,), math.nan)
    assert run(lambda v: op.subtract(op.exp(v), op.tanh(v)), x).isnan().all()
    big = torch.full((64,), math.inf)
    assert run(lambda v: op.subtract(op.exp(v), op.exp(v)), big).isnan().all()
