"""Calls past TorchDynamo's limit of graphs for a function are in the report."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tvmbridge


class Depths(nn.Module):
    """A module that Dynamo captures anew for each value of ``depth``."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.depth + 1):
            x = torch.tanh(self.layer(x)) + 1
        return x


def other(x: torch.Tensor, times: int) -> torch.Tensor:
    return (x * times).sin() + 2


@pytest.fixture(autouse=True)
def settings() -> None:
    with torch._dynamo.config.patch(recompile_limit=3, allow_unspec_int_on_nn_module=False):
        yield


def called(depths: list[int]) -> None:
    module = Depths()
    compiled = torch.compile(module, backend="tvmbridge")
    x = torch.randn(2, 4)
    for depth in depths:
        module.depth = depth
        torch.testing.assert_close(compiled(x), module(x))


def test_calls_past_the_limit_count_as_eager() -> None:
    called([0, 0, 1, 2, 3, 3, 4, 1, 0])
    report = tvmbridge.compile_report()
    assert (report.limited_calls, report.limited) == (3, ("Depths",))
    assert report.share == 6 / 9
    assert not report.whole
    assert not report.breaks
    text = " ".join(str(report).split())
    assert "past TorchDynamo's limit of graphs for a function: 3;" in text
    assert "what to do: raise torch._dynamo.config.recompile_limit" in text


def test_further_captures_of_other_functions_are_no_such_calls() -> None:
    called([0, 1, 2, 3])
    compiled = torch.compile(other, backend="tvmbridge", dynamic=False)
    for times in (1, 2, 1):
        compiled(torch.ones(3), times)
    assert tvmbridge.compile_report().limited_calls == 1


def test_as_many_graphs_as_are_allowed_are_none_too_many() -> None:
    called([0, 1, 2, 1, 0])
    report = tvmbridge.compile_report()
    assert report.whole
    assert report.limited == ()


def test_a_reset_begins_anew_and_restores_the_hook() -> None:
    hooks = torch._C._dynamo.eval_frame
    before = hooks.set_guard_complete_hook(None)
    hooks.set_guard_complete_hook(before)
    called([0, 1, 2, 3])
    torch.compiler.reset()
    assert tvmbridge.compile_report().limited_calls == 0
    assert hooks.set_guard_complete_hook(before) is before
    called([0, 1, 1])
    assert tvmbridge.compile_report().limited_calls == 0
