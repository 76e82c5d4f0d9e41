"""Unregistered modules and tensors that forward reads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import eager
from tvmbridge import CaptureError, add_tvm_dispatch, dispatch_report

TEACHER = nn.Linear(6, 6).requires_grad_(False)


class Reads(nn.Module):
    """A module whose forward is ``function(self, x)`` times a weight."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor], held: Any) -> None:
        super().__init__()
        self.function = function
        self.held = held
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x) * self.weight


REFUSED: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], Callable[[], Any], str]] = {
    "learning": (lambda m, x: m.held[0](x), lambda: [nn.Linear(6, 6)], "runs a Linear that is"),
    "frozen": (lambda m, x: m.held["a"](x), lambda: {"a": copy.deepcopy(TEACHER)}, "runs a Linear"),
    "global": (lambda m, x: TEACHER(x), lambda: None, "runs a Linear"),
    "of two modes": (lambda m, x: m.held[0](x), lambda: [nn.Dropout(0.5)], "runs a Dropout"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_learn_or_change_unseen_is_refused(kind: str) -> None:
    function, held, message = REFUSED[kind]
    module = Reads(function, held()).train()
    with pytest.raises(CaptureError, match=message):
        add_tvm_dispatch(module, torch.randn(2, 6))
    assert "forward" not in module.__dict__


def test_modules_that_forward_makes_or_that_hold_nothing_are_served() -> None:
    function = nn.Tanh()
    module = Reads(lambda m, x: nn.Dropout(0.0)(nn.Softmax(-1)(m.held[0](x))), [function]).eval()
    x = torch.randn(2, 6)
    expected = eager(module)(x)
    add_tvm_dispatch(module, x)
    assert torch.allclose(module(x), expected, atol=1e-6)
    assert dispatch_report(module).tvm_calls == 1


def test_a_tensor_in_an_object_that_was_written_before_is_no_write_of_forward() -> None:
    held = SimpleNamespace(scale=torch.ones(6).mul_(2))
    module = add_tvm_dispatch(Reads(lambda m, x: x * m.held.scale, held), torch.ones(2, 6))
    assert torch.equal(module(torch.ones(2, 6)), torch.full((2, 6), 2.0))
    assert dispatch_report(module).tvm_calls == 1
    held.scale.add_(1)
    assert torch.equal(module(torch.ones(2, 6)), torch.full((2, 6), 3.0))
