"""An entry of a module's __dict__ that hides what is registered, and counters that disappear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import eager
from tvmbridge import add_tvm_dispatch, dispatch_report


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)) * self.scale


@pytest.mark.parametrize(
    ("name", "value"), [("inner", nn.Identity()), ("scale", torch.full((4,), 3.0))]
)
def test_entries_that_hide_registered_values_are_noticed(name: str, value: Any) -> None:
    ours, x = add_tvm_dispatch(Scaled().eval(), torch.randn(2, 4)), torch.randn(2, 4)
    theirs = eager(ours)
    for hides in (False, False, True, True, False):
        for module in (ours, theirs):
            if hides:
                module.__dict__[name] = value
            else:
                module.__dict__.pop(name, None)
        with torch.no_grad():
            torch.testing.assert_close(ours(x), theirs(x))
    assert dispatch_report(ours).tvm_calls == 3


class Counting(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = getattr(self, "seen", 0) + 1
        return super().forward(x)


class Collecting(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "seen"):
            self.seen: Any = []
        result = super().forward(x)
        self.seen.append(result.mean())
        return result


@pytest.mark.parametrize("kind", [Counting, Collecting])
def test_what_the_first_call_creates_and_later_calls_add_to(kind: Callable[[], nn.Module]) -> None:
    ours, x = add_tvm_dispatch(kind().eval(), torch.randn(2, 4)), torch.randn(2, 4)
    theirs = eager(ours)
    for call in range(6):
        for module in (ours, theirs):
            if call == 4:
                del module.seen
        with torch.no_grad():
            torch.testing.assert_close(ours(x), theirs(x))
        torch.testing.assert_close(ours.seen, theirs.seen)
    assert dispatch_report(ours).tvm_calls == 4


class Helped(Scaled):
    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @staticmethod
    def static(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.helper(self.static(x)))


def looked_up(module: nn.Module, name: str) -> Any:
    return torch.full((4,), 5.0) if name == "scale" else nn.Module.__getattribute__(module, name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("helper", lambda module, x: x - 1),
        ("static", staticmethod(lambda x: x * 7)),
        ("__getattribute__", looked_up),
    ],
)
def test_methods_that_a_subclass_gets_later_are_noticed(name: str, value: Any) -> None:
    class Late(Helped):
        pass

    ours, x = add_tvm_dispatch(Late().eval(), torch.randn(2, 4)), torch.randn(2, 4)
    theirs = eager(ours)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(ours(x), theirs(x))
        setattr(Late, name, value)
        for _ in range(2):
            torch.testing.assert_close(ours(x), theirs(x))
        delattr(Late, name)
        torch.testing.assert_close(ours(x), theirs(x))
    assert dispatch_report(ours).tvm_calls == 3
