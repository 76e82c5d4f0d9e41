"""Operators with generated loops: results, bounds checks and errors equal eager PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import tvmbridge
from tests.frontend.helpers import Cases, Function, Together, assert_like_eager
from tests.thinned import thinned

NAN, INF = float("nan"), float("inf")
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(9, 13, generator=GENERATOR)
SPECIAL = torch.tensor(
    [0.0, -0.0, 1, -1, NAN, INF, -INF, 0.5, -0.5, 2, -2, 1e-40, 3e38, -3e38, 1e-6]
)
WIDE = torch.cat([SPECIAL, torch.linspace(-9, 9, 301), torch.logspace(-6, 6, 101)])
TIES = torch.tensor([[2.0, NAN, 2.0, NAN], [INF, -INF, INF, 1.0], [-0.0, 0.0, -1.0, -1.0]])
IMAGE = torch.randn(2, 3, 12, 12, generator=GENERATOR)
IMAGE[0, 0, 3, 4], IMAGE[0, 1, 2, 2], IMAGE[1, 2] = NAN, INF, -INF
INTS = torch.arange(-9, 9)
FACTORS: list[dict[str, Any]] = [
    {"size": (9, 17)},
    {"scale_factor": (1.7, 0.4)},
    {"scale_factor": 1.7, "recompute_scale_factor": True},
    {"size": (1, 5)},
]
ROWS = torch.tensor([[0, -1, 3], [8, -9, 3]])

CASES: Cases = {
    **{
        name: (getattr(torch, name), (WIDE,))
        for name in ["log1p", "expm1", "cosh", "asinh", "acosh", "atanh", "asin", "acos", "atan"]
    },
    "atan2": (lambda x: torch.atan2(x[:, None], x), (SPECIAL,)),
    "elu": (lambda x: (functional.elu(x), functional.elu(x, 1.3)), (WIDE,)),
    "softplus": (
        lambda x: (
            functional.softplus(x),
            functional.softplus(x, -1.3, 5.0),
            torch.ops.aten.softplus_backward(x.flip(0), x, 1.3, 5.0),
        ),
        (WIDE,),
    ),
    # PyTorch's vectorized fmod fails for quotients beyond 2**126 and for denormal numbers.
    "fmod": (lambda x: (x.fmod(2.5), x.fmod(-0.3), x.fmod(1e-40), (x * 1e30).fmod(1e-3)), (WIDE,)),
    "quotients rounded down": (
        lambda x: (
            torch.div(x, 2.5, rounding_mode="floor"),
            torch.div(x[:, None], x, rounding_mode="floor"),
            torch.div(x * 1e30, 1e-3, rounding_mode="floor"),
        ),
        (SPECIAL,),
    ),
    "quotients rounded to zero": (lambda x: torch.div(x, -2.5, rounding_mode="trunc"), (WIDE,)),
    "integers": (
        lambda i: (i // 3, torch.div(i, 3, rounding_mode="trunc"), i.fmod(5), i & 5, i | 3, i ^ 7),
        (INTS,),
    ),
    "indices": (
        lambda x, i: (x[i], x[:, i], x[i[:, 0], None, i[:, 1]], x[i, i + 0], x[None, :, i.int()]),
        (X[:, :9], ROWS),
    ),
    "gather and index_select": (
        lambda x, i: (x.gather(0, i), x.gather(-1, i), x.index_select(1, i[0])),
        (X, ROWS.abs() % 9),
    ),
    "diagonal": (lambda x: (x.diagonal() + 1, x.diagonal(2, 1, 0), x.diagonal(-3)), (X,)),
    "slice_scatter": (
        lambda x: (x.slice_scatter(x[:3] * 2, 0, 1, 7, 2), x.slice_scatter(x[:, :4], 1, -4)),
        (X,),
    ),
    "ties and NaN": (
        lambda x: (x.argmax(1), x.argmin(0), x.argmax(), x.max(1), x.min(0, True), x.argmin(-1)),
        (TIES,),
    ),
    "an extremum of few columns": (lambda x: (x.argmax(0), x.max(0)), (X.T.contiguous(),)),
    "means of windows": (
        lambda x: (
            functional.avg_pool2d(x, 2),
            functional.avg_pool2d(x, 3, 1, 1),
            functional.avg_pool2d(x, (3, 2), (2, 1)),
            functional.avg_pool1d(x[0], 4),
            functional.avg_pool3d(x, 2),
        ),
        (IMAGE,),
    ),
    "largest of windows": (
        lambda x: (functional.max_pool2d(x, 3, 2, 1), functional.max_pool2d(x, 2, 1, 0, 2)),
        (IMAGE,),
    ),
    "adaptive means": (
        lambda x: (
            functional.adaptive_avg_pool2d(x, 1),
            functional.adaptive_avg_pool2d(x, (3, 4)),
            functional.adaptive_avg_pool2d(x, 5),
            functional.adaptive_avg_pool1d(x[0], 6),
            functional.adaptive_avg_pool3d(x, (3, 2, 2)),
        ),
        (IMAGE,),
    ),
    "nearest": (lambda x: functional.interpolate(x, scale_factor=2), (IMAGE,)),
    "nearest by other factors": (
        lambda x: tuple(functional.interpolate(x, **f) for f in FACTORS),
        (IMAGE,),
    ),
    "bilinear": (
        lambda x: tuple(
            functional.interpolate(x, mode="bilinear", align_corners=corners, **f)
            for f in (*FACTORS, {"size": (12, 12)})
            for corners in (False, True)
        ),
        (IMAGE,),
    ),
    "norms": (
        lambda x: (x.norm(), *(torch.linalg.vector_norm(x, p, 0) for p in (1, 2, 3, INF))),
        (X,),
    ),
}

TOGETHER = Together(CASES)


@pytest.mark.parametrize("name", thinned(CASES, 2))
def test_result_is_eager_s(name: str) -> None:
    TOGETHER.assert_like_eager(name)


@pytest.mark.parametrize("dtype", thinned([torch.float64, torch.float16, torch.bfloat16], 3))
def test_other_floats(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    assert_like_eager(lambda x: (x.log1p(), x.atan(), x.asinh(), functional.elu(x)), x)
    report = assert_like_eager(
        lambda x: (functional.softplus(x), x.clamp(-0.3, 0.7), x.clamp(min=0.1)), x
    )
    assert not report.aten_calls
    assert_like_eager(lambda x, i: (x[i[0]], x.gather(0, i), x.diagonal()), x, ROWS.abs() % 9)


@pytest.mark.parametrize(
    "function",
    [lambda x, i: x[i], lambda x, i: x.gather(0, i[:, None]), lambda x, i: x.index_select(0, i)],
)
def test_an_index_out_of_bounds_raises_as_in_eager(function: Callable[..., Any]) -> None:
    module, good = Function(function).eval(), torch.tensor([1, 2])
    with torch.no_grad():
        tvmbridge.add_tvm_dispatch(module, (X, good))
        for index in (9, -10, 2**40):
            bad = torch.tensor([1, index])
            with pytest.raises((IndexError, RuntimeError)) as eager:
                function(X, bad)
            with pytest.raises(type(eager.value)):
                module(X, bad)
        torch.testing.assert_close(module(X, good), function(X, good))


def test_they_are_no_calls_of_pytorch_s_kernels() -> None:
    report = assert_like_eager(lambda x, i: (x[i] * 2, x.log1p().argmax(1)), X.abs(), ROWS[0])
    assert not report.aten_calls
