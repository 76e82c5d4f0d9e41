"""Some drawn modules in the default suite, and differences that the comparison must find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import tvmbridge
from tests.random_graphs.__main__ import BAD
from tests.random_graphs.check import check
from tests.random_graphs.program import Call, Leaf, Program
from tests.random_graphs.reduce import reduced
from tests.random_graphs.runner import drawn
from tests.thinned import thinned

BUFFER = Leaf("b0", "buffer", (3,), "float64", "normal")
LEAVES = (Leaf("x0", "input", (3,), "float64", "normal", True), BUFFER)
CALLS = (Call(("x0",)), Call(("x0 * 1",), ("module.b0.mul_(2)",), seed=1))
LINES = ("v0 = x0 * 2", "self.b0.add_(1)")
COUNTED = Program("float64", LEAVES, LINES, "(v0, v0[:2])", calls=CALLS)


def _rightly(module: nn.Module, x: torch.Tensor) -> Any:
    v0 = x * 2
    module.get_buffer("b0").add_(1)
    return v0, v0[:2]


def _without_write(module: nn.Module, x: torch.Tensor) -> Any:
    v0 = x * 2
    return v0, v0[:2]


def _apart(module: nn.Module, x: torch.Tensor) -> Any:
    v0, v1 = _rightly(module, x)
    return v0, v1.clone()


def _writing(module: nn.Module, x: torch.Tensor) -> Any:
    results = _rightly(module, x)
    x.data.mul_(2)
    return results


def _drawing(module: nn.Module, x: torch.Tensor) -> Any:
    torch.rand(1)
    return _rightly(module, x)


def _detaching(module: nn.Module, x: torch.Tensor) -> Any:
    _rightly(module, x)
    v0 = x + x.detach()
    return v0, v0[:2]


def _raising(module: nn.Module, x: torch.Tensor) -> Any:
    if not x.is_leaf:
        raise ValueError("no leaf")
    return _rightly(module, x)


def _in_a_list(module: nn.Module, x: torch.Tensor) -> Any:
    return list(_rightly(module, x))


@pytest.mark.parametrize(
    ("forward", "noticed"),
    [
        (_without_write, "state"),
        (_apart, "sharing"),
        (_writing, "arguments"),
        (_drawing, "generator"),
        (_detaching, "gradients"),
        (_raising, "call 1: raises ValueError"),
        (_in_a_list, "results"),
    ],
)
def test_a_forward_that_differs_is_noticed(
    forward: Callable[..., Any], noticed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dispatch(module: nn.Module, sample: Any, options: Any) -> None:
        monkeypatch.setattr(module, "forward", lambda x: forward(module, x), raising=False)

    monkeypatch.setattr(tvmbridge, "add_tvm_dispatch", dispatch)
    outcome = check(COUNTED)
    assert outcome.result == "wrong", outcome
    assert noticed in outcome.reason


@pytest.mark.parametrize("number", thinned([3, 1], 2))
def test_drawn_module(number: int) -> None:
    program = drawn(number, 0, "modules")
    outcome = check(program)
    assert outcome.result not in BAD, f"{outcome}\n{program.source()}\n{program.script()}"


def test_calls_that_agree_are_right() -> None:
    outcome = check(COUNTED)
    assert outcome.result == "right", outcome


def test_calls_that_are_not_needed_are_left_out() -> None:
    calls = (*CALLS, Call(("x0.detach()",), seed=2), Call(("x0",), training=False))

    def check_evaluation(candidate: Program) -> Any:
        wrong = any(not call.training for call in candidate.calls)
        return replace(check_nothing, result="wrong" if wrong else "right")

    check_nothing = check(replace(COUNTED, lines=("v0 = x0[7]",)))
    smallest = reduced(replace(COUNTED, calls=calls), check_evaluation)
    assert smallest.calls == (CALLS[0], calls[-1])
    assert smallest.returned == "v0"
    assert smallest.lines == ("v0 = x0 * 2",)
