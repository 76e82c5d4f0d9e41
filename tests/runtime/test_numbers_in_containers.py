"""Numbers in dicts, lists and plain objects of a module are inputs of compiled code."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as replaced
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.test_changing_attributes import _agree, _called, _pair
from tvmbridge import dispatch_report


@dataclass
class Loss:
    beta: float = 0.5


@dataclass(frozen=True)
class Frozen:
    beta: float = 0.5


class Attributes(dict[str, Any]):
    """A dict whose items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value * 2


class Scaled(nn.Module):
    def __init__(self, state: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.state, self.read = state, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) * self.read(self))


def _put(name: str) -> Callable[[Any, float], None]:
    return lambda m, value: setattr(m.state, name, value)


def _replace(m: Any, value: float) -> None:
    m.state = replaced(m.state, beta=value)


def _in_dict(m: Any, value: float) -> None:
    m.state["loss"]["beta"] = value


def _in_list(m: Any, value: float) -> None:
    m.state[1] = value


def _update(m: Any, value: float) -> None:
    m.state.update(beta=value)


CHANGED: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any, float], None]]] = {
    "dict": ({"loss": {"beta": 0.5}, "name": "a"}, lambda m: m.state["loss"]["beta"], _in_dict),
    "list": ([1.0, 0.5], lambda m: m.state[0] + m.state[1], _in_list),
    "dataclass": (Loss(), lambda m: m.state.beta, _put("beta")),
    "frozen": (Frozen(), lambda m: m.state.beta, _replace),
    "namespace": (types.SimpleNamespace(beta=0.5), lambda m: m.state.beta, _put("beta")),
    "attributes": (Attributes(beta=0.5), lambda m: m.state.beta, _put("beta")),
    "copied": ({"beta": 0.5}, lambda m: copy.deepcopy(m.state)["beta"], _update),
    "ordered": (OrderedDict(beta=0.5), lambda m: sum(m.state.values()), _update),
}
SLOW = {"list", "namespace", "copied", "ordered", "dataclass", "frozen"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CHANGED]
)
def test_one_code_serves_all_numbers(name: str) -> None:
    state, read, change = CHANGED[name]
    eager, served = _pair(Scaled(copy.deepcopy(state), read))
    for value in (0.5, 0.25, 2.0, 2.0, -1.0):
        change(eager, value)
        change(served, value)
        _agree(eager, served)
    report = dispatch_report(served)
    assert (report.tvm_calls, len(report.specializations)) == (5, 1)


def _count(m: Any) -> Any:
    m.state["step"] += 1
    m.state["beta"] = 0.1 * m.state["step"]
    return m.state["beta"]


def _count_modulo(m: Any) -> Any:
    # The runs of forward that observe it leave the number as it was.
    m.state["step"] = (m.state["step"] + 1) % 3
    return m.state["step"] + 1


def _count_in_object(m: Any) -> Any:
    m.state.beta += 1
    return 1 / m.state.beta


@pytest.mark.parametrize(
    ("state", "read"),
    [
        ({"step": 0, "beta": 0.0}, _count),
        ({"step": 0}, _count_modulo),
        (Loss(), _count_in_object),
    ],
    ids=["dict", "modulo", "object"],
)
def test_forward_changes_the_numbers(state: Any, read: Callable[[Any], Any]) -> None:
    eager, served = _pair(Scaled(copy.deepcopy(state), read))
    for _ in range(4):
        _agree(eager, served)
        assert served.state == eager.state
    report = dispatch_report(served)
    assert (report.tvm_calls, len(report.specializations)) == (4, 1)


def test_a_class_that_changes_what_is_assigned_is_respected() -> None:
    eager, served = _pair(Scaled(Attributes(beta=1.0), _count_in_object))
    for _ in range(3):
        _agree(eager, served)
        assert served.state == eager.state


class Shared(nn.Module):
    """Two modules that share a dict."""

    def __init__(self) -> None:
        super().__init__()
        state = {"beta": 0.5}
        read = CHANGED["copied"][1]
        self.first, self.second = Scaled(state, read), Scaled(state, read)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x.cos())


@pytest.mark.slow
def test_a_shared_dict_that_is_parted() -> None:
    eager, served = _pair(Shared())
    for value in (0.5, 0.25, 2.0):
        eager.first.state["beta"] = served.first.state["beta"] = value
        _agree(eager, served)
    assert dispatch_report(served).tvm_calls == 3
    for module in (eager, served):
        module.second.state = {"beta": 3.0}
    _agree(eager, served)


def test_numbers_change_before_backward_and_second_derivatives_do_not_see_it() -> None:
    state, read, change = CHANGED["dict"]
    eager, served = _pair(Scaled(copy.deepcopy(state), read).double())
    found = []
    for module in (eager, served):
        for value in (0.5, 0.25):  # the number is an input from the second value on
            change(module, value)
            module(torch.ones(2, 4, dtype=torch.float64, requires_grad=True))
        for value in (0.5, 2.0):
            change(module, value)
            x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4).requires_grad_()
            y = module(x)
            change(module, 7.0)
            (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(found[2:], found[:2])
    assert dispatch_report(served).tvm_calls == 4


def test_a_copy_has_numbers_of_its_own() -> None:
    state, read, change = CHANGED["dict"]
    eager, served = _pair(Scaled(copy.deepcopy(state), read))
    for value in (0.5, 2.0):
        for module in (eager, served):
            change(module, value)
        _agree(eager, served)
    other = copy.deepcopy(served)
    change(other, 3.0)
    x = torch.randn(3, 4)
    torch.testing.assert_close(_called(served, x), _called(eager, x))
    change(eager, 3.0)
    torch.testing.assert_close(_called(other, x), _called(eager, x))
    assert dispatch_report(other).tvm_calls == 1
