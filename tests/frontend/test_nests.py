"""Operators with generated loop nests that are never fused: results equal eager PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import tvmbridge
from tests.frontend.helpers import Cases, Function, Together, run

NAN, INF = float("nan"), float("inf")
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(5, 7, generator=GENERATOR)
ODD = X.clone()
ODD[0, :4], ODD[1, :3], ODD[2] = torch.tensor([NAN, INF, -INF, 0.0]), NAN, -0.0
INTS = torch.randint(-3, 4, (6, 5), generator=GENERATOR)
# Indices, some of them repeated.
PLACES = torch.tensor([[0, 4, 4, 2], [3, 4, 0, 0]])
NEGATIVE = torch.tensor([[0, -1, 3], [4, -5, 3]])
EXPONENTS = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, INF, NAN])

CASES: Cases = {
    "running sums": (
        lambda x, i: (x.cumsum(0), x.cumsum(-1), i.cumsum(1), (i > 0).cumsum(0), i.cumsum(0) / 2),
        (ODD, INTS),
    ),
    "a running sum of another dtype": (
        lambda x: (x.cumsum(1, dtype=torch.float64), x[None].cumsum(1)),
        (X,),
    ),
    "scatter": (
        lambda x, i, y: (x.scatter(0, i, y), x.scatter(-1, i, y), x.scatter(1, i, -2.5)),
        (X, PLACES, ODD[:2, :4]),
    ),
    "scatter_add": (
        lambda x, i, y: (x.scatter_add(0, i, y), x.scatter_add(1, i.int(), y)),
        (X, PLACES, ODD[:2, :4]),
    ),
    "indices written": (
        lambda x, i: (
            torch.ops.aten.index_put(x, [i[0]], x[:3] * 2, True),
            torch.ops.aten.index_put(x, [i, i], x[0, 0], True),
            torch.ops.aten.index_put(x, [None, i[1]], x[:, :1]),
            torch.ops.aten.index_put(x[None], [None, i[0], i[1]], x[0, :3]),
            torch.ops.aten.index_put(x[None], [i[0, :1], None, i[1]], x[0, :3, None], True),
            x.index_add(0, i[0].abs(), x[:3], alpha=2),
            x.index_copy(1, i[0].abs(), x[:, :3] * 3),
        ),
        (X, NEGATIVE),
    ),
    "sorted": (
        lambda x, i: (
            x.sort(stable=True),
            x.sort(0, descending=True)[0],
            x.sort(dim=0, descending=True, stable=True),
            i.sort(dim=1, stable=True),
            i.argsort(dim=0, descending=True, stable=True),
            i.sort()[0],
        ),
        (ODD, INTS),
    ),
    "the largest and the smallest": (
        lambda x, i: (x.topk(3)[0], x.topk(1, 0, False)[0], x.topk(7)[0], i.topk(2, 0)[0]),
        (ODD, INTS),
    ),
    "histograms": (
        lambda x, y: (x.histc(4, -1, 1), y.histc(5), y.histc(3, 1, 1), (y * 0 + 2).histc(2)),
        (ODD, X),
    ),
    "distances": (
        lambda x, y: [
            result
            for p in (0, 1, 2, 3.5, INF)
            for result in (torch.cdist(x, y, p), torch.pdist(x, p), torch.cdist(x[None], y[:1], p))
        ],
        (ODD, X * 2),
    ),
    "windows summed": (
        lambda x, y: (
            functional.fold(x, (4, 5), (2, 2)),
            functional.fold(y, (4, 5), (2, 3), (2, 1), 1, (2, 1)),
        ),
        (torch.randn(2, 8, 12, generator=GENERATOR), torch.randn(12, 10, generator=GENERATOR)),
    ),
    "powers": (
        lambda x, e: (x**e, 2**x, 0**e, (-1.5) ** e, x**2.5, x.abs() ** -0.3, x.double() ** e),
        (ODD, EXPONENTS),
    ),
    "halves": (
        lambda x, i, y: [
            result
            for t, s in ((x.half(), y.half()), (x.bfloat16(), y.bfloat16()))
            for result in (
                t.cumsum(0),
                t.scatter_add(0, i, s),
                t.topk(2)[0],
                t.sort(stable=True),
                t.abs() ** 0.7,
                2.7**t,
                t.abs() ** t[0],
            )
        ],
        (X, PLACES, X[:2, :4]),
    ),
    "doubles": (
        lambda x, i: (x.cumsum(0), x.scatter_add(0, i, x), x.sort()[0], torch.cdist(x, x), x**x),
        (X.double(), PLACES),
    ),
}
TOGETHER = Together(CASES)


@pytest.mark.parametrize("name", CASES)
def test_result_is_eager_s(name: str) -> None:
    TOGETHER.assert_like_eager(name)


def test_they_are_no_calls_of_pytorch_s_kernels() -> None:
    TOGETHER.assert_like_eager("powers")
    assert TOGETHER.report is not None
    (specialization,) = TOGETHER.report.specializations
    called = {name.split(".")[1] for name in specialization.aten_operators}
    assert called.isdisjoint({"scatter", "scatter_add", "index_put", "topk", "histc"})


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x.scatter_add(0, i[:, None], x),
        lambda x, i: torch.ops.aten.index_put(x, [i], x[:2]),
    ],
)
def test_an_index_out_of_bounds_raises_as_in_eager(function: Callable[..., Any]) -> None:
    module, good = Function(function).eval(), torch.tensor([1, 2])
    with torch.no_grad():
        tvmbridge.add_tvm_dispatch(module, (X, good))
        for index in (5, -6):
            bad = torch.tensor([1, index])
            with pytest.raises((IndexError, RuntimeError)) as eager:
                function(X, bad)
            with pytest.raises(type(eager.value)):
                module(X, bad)
        torch.testing.assert_close(module(X, good), function(X, good))


def test_a_range_that_is_not_finite_raises_as_in_eager() -> None:
    module = Function(lambda x: x.histc(4)).eval()
    with torch.no_grad():
        tvmbridge.add_tvm_dispatch(module, (X,))
        with pytest.raises(RuntimeError):
            ODD.histc(4)
        with pytest.raises(RuntimeError):
            module(ODD)


def test_what_is_large_or_has_ties_of_no_certain_order_stays_a_call() -> None:
    large = torch.randn(1 << 17)
    places = torch.arange(1 << 17)
    _, report = run(
        lambda x, y, i: (x.sort(), x.topk(2), x.topk(2, sorted=False)[0], y.scatter(0, i, y)),
        X,
        large,
        places,
    )
    (specialization,) = report.specializations
    assert not specialization.native_operators
