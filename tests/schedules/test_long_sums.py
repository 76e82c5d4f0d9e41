"""Sums of many float32 numbers are as close to float64 as eager PyTorch's sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import tvm

import tvmbridge
from tests.frontend.helpers import Function
from tests.thinned import but_slow, thinned
from tvmbridge.schedules.target import host_target

Summed = Callable[[torch.Tensor], torch.Tensor]

# By name: a sum, and the input's shape; all elements of a result have similar errors.
CASES: dict[str, tuple[Summed, tuple[int, ...]]] = {
    "rows": (lambda x: x.sum(-1), (64, 1 << 16)),
    "rows of no whole number of vectors": (lambda x: x.sum(-1), (64, (1 << 16) + 27)),
    "rows of something dear": (lambda x: x.exp().sigmoid().tanh().mean(-1), (64, 1 << 15)),
    "pictures": (lambda x: x.mean((0, 2, 3)), (32, 12, 100, 100)),
    "columns": (lambda x: x.sum(0), (1 << 19, 4)),
}


@pytest.mark.parametrize(("summed", "shape"), thinned(CASES.values(), 2), ids=CASES)
def test_long_sums_are_as_close_as_eager(summed: Summed, shape: tuple[int, ...]) -> None:
    check(summed, shape)


def test_rows_that_many_cores_share_are_as_close() -> None:
    check(*CASES["rows of no whole number of vectors"], {**host_target().export(), "num-cores": 38})


def check(summed: Summed, shape: tuple[int, ...], target: dict[str, Any] | None = None) -> None:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    module = Function(summed)
    with torch.no_grad():
        tvmbridge.add_tvm_dispatch(module, x, target=target and tvm.target.Target(target))
        ours, eager, exact = module(x), summed(x), summed(x.double())
    assert tvmbridge.dispatch_report(module).fallbacks == {}
    unit = torch.finfo(torch.float32).eps * exact.abs()

    def off(result: torch.Tensor) -> torch.Tensor:
        return (result.double() - exact).abs() / unit

    assert off(ours).mean() <= off(eager).mean() + 0.25
    assert off(ours).max() <= 2 * off(eager).max() + 0.5


@pytest.mark.parametrize("columns", but_slow([8191, 8192, 8193, 16384, 16500], 8191, 8192, 16384))
def test_extremes_and_sums_of_stretches(columns: int) -> None:
    x = torch.randn(9, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def several(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.exp().sum(-1), x.amax(-1), (x - x.mean(-1, keepdim=True)).square().sum(-1)

    module = Function(several)
    with torch.no_grad():
        tvmbridge.add_tvm_dispatch(module, x)
        torch.testing.assert_close(module(x), several(x), rtol=1e-13, atol=0.0)
