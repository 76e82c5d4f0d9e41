"""softmax, log_softmax, layer_norm and rms_norm against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional
from tvm.relax import op

from tests.legalize.compiled import run

SHAPES = [(4, 16), (7, 13), (3, 5, 77), (2, 1), (1, 130), (14, 768)]


@pytest.mark.parametrize("shape", SHAPES)
def test_softmax(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape) * 4
    for axis in range(len(shape)):
        result = run(lambda v, a=axis: op.nn.softmax(v, a), x)
        torch.testing.assert_close(result.double(), x.double().softmax(axis), rtol=2e-6, atol=1e-7)
        result = run(lambda v, a=axis: op.nn.log_softmax(v, a), x)
        exact = x.double().log_softmax(axis)
        torch.testing.assert_close(result.double(), exact, rtol=1e-6, atol=2e-6)


def test_softmax_of_masked_rows() -> None:
    x = torch.randn(4, 33)
    x[0] = -math.inf
    x[1, 5:] = -math.inf
    x[2, 3] = math.nan
    result = run(lambda v: op.nn.softmax(v, -1), x)
    torch.testing.assert_close(result, x.softmax(-1), equal_nan=True, rtol=2e-6, atol=1e-7)


def test_softmax_of_large_values() -> None:
    x = torch.tensor([[1e30, 1e30, -1e30], [500.0, 400.0, 300.0]])
    torch.testing.assert_close(run(lambda v: op.nn.softmax(v, -1), x), x.softmax(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_softmax_in_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.randn(5, 40).to(dtype)
    result = run(lambda v: op.nn.softmax(v, -1), x)
    tolerance = 1e-14 if dtype == torch.float64 else torch.finfo(dtype).eps / 2 * 1.01
    exact = x.double().softmax(-1)
    torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=1e-7 * tolerance)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    w, b = torch.randn(shape[-1:]).to(dtype), torch.randn(shape[-1:]).to(dtype)
    result = run(lambda v, g, c: op.nn.layer_norm(v, g, c, -1, 1e-5), x, w, b)
    exact = functional.layer_norm(x.double(), shape[-1:], w.double(), b.double())
    tolerance = 4e-6 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance)


def test_layer_norm_over_two_axes() -> None:
    x, w, b = torch.randn(6, 5, 7), torch.randn(5, 7), torch.randn(5, 7)
    result = run(lambda v, g, c: op.nn.layer_norm(v, g, c, [-2, -1], 1e-5), x, w, b)
    exact = functional.layer_norm(x.double(), (5, 7), w.double(), b.double())
    torch.testing.assert_close(result.double(), exact, rtol=4e-6, atol=4e-6)


def test_layer_norm_far_from_zero_loses_nothing() -> None:
    x = torch.randn(4, 256) + 1000
    w, b = torch.ones(256), torch.zeros(256)
    result = run(lambda v, g, c: op.nn.layer_norm(v, g, c, -1, 1e-5), x, w, b)
    exact = functional.layer_norm(x.double(), (256,))
    torch.testing.assert_close(result.double(), exact, rtol=1e-3, atol=1e-3)


def test_rms_norm() -> None:
    x, w = torch.randn(9, 77), torch.randn(77)
    result = run(lambda v, g: op.nn.rms_norm(v, g, -1, 1e-6), x, w)
    exact = functional.rms_norm(x.double(), (77,), w.double(), 1e-6)
    torch.testing.assert_close(result.double(), exact, rtol=2e-6, atol=2e-6)
