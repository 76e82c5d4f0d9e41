"""softmax, log_softmax, layer_norm and rms_norm against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional
from tvm.relax import op

from tests.legalize.compiled import run, run_all

SHAPES = [(4, 16), (7, 13), (3, 5, 77), (2, 1), (1, 130), (14, 768)]


def test_softmax() -> None:
    cases = [(torch.randn(shape) * 4, axis) for shape in SHAPES for axis in range(len(shape))]
    results = run_all(*((lambda v, a=axis: op.nn.softmax(v, a), x) for x, axis in cases))
    for (x, axis), result in zip(cases, results, strict=True):
        torch.testing.assert_close(result.double(), x.double().softmax(axis), rtol=2e-6, atol=1e-7)
    results = run_all(*((lambda v, a=axis: op.nn.log_softmax(v, a), x) for x, axis in cases))
    for (x, axis), result in zip(cases, results, strict=True):
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


def test_softmax_in_other_dtypes() -> None:
    given = [torch.randn(5, 40).to(t) for t in (torch.float16, torch.bfloat16, torch.float64)]
    results = run_all(*((lambda v: op.nn.softmax(v, -1), x) for x in given))
    for x, result in zip(given, results, strict=True):
        tolerance = 1e-14 if x.dtype == torch.float64 else torch.finfo(x.dtype).eps / 2 * 1.01
        exact = x.double().softmax(-1)
        torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=1e-7 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm(dtype: torch.dtype) -> None:
    cases = [
        [torch.randn(s).to(dtype) for s in (shape, shape[-1:], shape[-1:])] for shape in SHAPES
    ]
    results = run_all(*((lambda v, g, c: op.nn.layer_norm(v, g, c, -1, 1e-5), *c) for c in cases))
    tolerance = 4e-6 if dtype == torch.float32 else 8e-3
    for (x, w, b), result in zip(cases, results, strict=True):
        exact = functional.layer_norm(x.double(), x.shape[-1:], w.double(), b.double())
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
