"""Sizes without symbolic code get code of their own, the most frequent sizes first."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.core.errors import BuildError
from tvmbridge.runtime.family import Family


@pytest.fixture(autouse=True)
def _no_symbolic_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise BuildError("no code for any size")

    monkeypatch.setattr(Family, "__call__", refuse)
    monkeypatch.setattr(Family, "entry", refuse)


def served(rows: Sequence[int], train: bool = False) -> tuple[int, int]:
    """Call a module with these numbers of rows; return counts of served calls and compilations."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).train(train)
    eager = copy.deepcopy(module)
    add_tvm_dispatch(module, dynamic_shapes="auto", on_fallback="silent", on_break="forward")
    for count in rows:
        x = torch.randn(count, 8)
        torch.testing.assert_close(module(x), eager(x))
    report = dispatch_report(module)
    assert report.tvm_calls + sum(report.fallbacks.values()) == len(rows)
    return report.tvm_calls, len(report.specializations)


# The other tests here are of evaluation, so that quick tests need it only for train mode.
@pytest.mark.parametrize(
    "train",
    [pytest.param(False, id="eval", marks=pytest.mark.slow), pytest.param(True, id="train")],
)
def test_four_sizes_are_served_where_there_is_no_symbolic_code(train: bool) -> None:
    assert served([4, 5, 6, 7] * 3, train) == (12, 4)


def test_sizes_that_come_equally_often_take_no_place_of_each_other() -> None:
    calls, compilations = served([4, 5, 6, 7, 8, 9, 10, 11] * 4)
    assert (calls, compilations) == (16, 4)


def test_a_size_that_comes_more_often_takes_the_place_of_the_least_used() -> None:
    calls, compilations = served([4, 5, 6, 7, *[8] * 20])
    assert compilations == 4
    assert calls > 20
