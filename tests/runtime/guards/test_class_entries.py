"""Attributes of classes that hide attributes of instances, and ``__dict__`` that is replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.core.contents import MISSING
from tvmbridge.runtime.guards import watch


def _module() -> nn.Module:
    class Config:
        def __init__(self) -> None:
            self.scale = 2.0

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)
            self.factor, self.config = 1.0, Config()
            self.register_buffer("shift", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) * self.factor * self.config.scale + self.shift

    return Scaled()


def _hidden_in_config(module: Any) -> None:
    type(module.config).scale = property(lambda config: 9.0)


def _own_dict(module: Any) -> None:
    module.__dict__ = dict(module.__dict__)
    module.factor = 4.0


def _dict_of_body(module: Any) -> None:
    weight = nn.Parameter(torch.eye(4))
    parameters = {**module.body._parameters, "weight": weight}
    module.body.__dict__ = {**module.body.__dict__, "_parameters": parameters}


def _dict_of_config(module: Any) -> None:
    module.config.__dict__ = {"scale": 11.0}


CHANGES: dict[str, Callable[[Any], None]] = {
    "a property": lambda m: setattr(type(m), "factor", property(lambda self: 3.0)),
    "a property, of a buffer": lambda m: setattr(type(m), "shift", property(lambda self: 3.0)),
    "a tensor, of a buffer": lambda m: setattr(type(m), "shift", torch.full((4,), 5.0)),
    "a submodule": lambda m: setattr(type(m), "body", nn.Linear(4, 4)),
    "a property of an object": _hidden_in_config,
    "the module's __dict__": _own_dict,
    "a submodule's __dict__": _dict_of_body,
    "an object's __dict__": _dict_of_config,
}


# The first differs from a tensor of a buffer in its value alone; a test below watches the second.
_SLOW = ("a property, of a buffer", "an object's __dict__")
CASES = [
    *(
        pytest.param(name, "compiled", marks=[pytest.mark.slow] if name in _SLOW else [])
        for name in CHANGES
    ),
    ("a property", "python"),
]


@pytest.mark.parametrize(("name", "half"), CASES)
@torch.no_grad()
def test_a_call_after_the_change_is_right(
    name: str, half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if half == "python":
        monkeypatch.setattr(watch, "native_half", lambda: None)
    module, x = add_tvm_dispatch(_module().eval()), torch.randn(2, 4)
    before = [module(x) for _ in range(3)][-1]
    CHANGES[name](module)
    expected = type(module).forward(module, x)
    assert not torch.allclose(expected, before)
    for _ in range(2):
        torch.testing.assert_close(module(x), expected)


@torch.no_grad()
def test_a_class_attribute_that_the_instance_hides_changes_nothing() -> None:
    module, x = add_tvm_dispatch(_module().eval()), torch.randn(2, 4)
    module(x)
    type(module).factor = 7.0  # type: ignore[attr-defined]
    for _ in range(2):
        module(x)
    report = dispatch_report(module)
    assert report.tvm_calls == 3
    assert len(report.specializations) == 1


@pytest.mark.parametrize("half", ["compiled", "python"])
def test_a_watch_notices_another_dict_of_an_object(half: str) -> None:
    native = watch.native_half()
    if half == "compiled" and native is None:
        pytest.skip("the compiled half is missing")
    first, second = nn.Identity(), object()
    held: Any = (), (first, second), (), (), (), ()
    made = native.Watch(*held, MISSING) if half == "compiled" else watch.PythonWatch(*held)
    assert made.unchanged()
    first.__dict__ = dict(first.__dict__)
    assert not made.unchanged()
