"""The guard notices if an attribute refers to another module, or to another module's method."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import eager
from tests.thinned import covering
from tvmbridge import add_tvm_dispatch, dispatch_report

F = nn.functional


class Holding(nn.Module):
    """Runs its submodule ``a`` through the attribute ``held``: a method, container or object."""

    def __init__(self, hold: Callable[[nn.Module], Any], run: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.hold, self.run = hold, run
        self.held = hold(self.a)

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self.held, x)


class Holder:
    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer


WAYS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any, Any], Any]]] = {
    "a method": (lambda m: m.forward, lambda held, x: held(x)),
    "a method in a list": (lambda m: [m.forward], lambda held, x: held[0](x)),
    "a partial": (lambda m: functools.partial(m.forward), lambda held, x: held(x)),
    "a dict": (lambda m: {"layer": m}, lambda held, x: held["layer"](x)),
    "an object": (Holder, lambda held, x: held.layer(x)),
}


@pytest.mark.parametrize(("way", "of_copy"), covering([*WAYS], [False, True]))
def test_another_module_of_the_same_class_is_noticed(way: str, of_copy: bool) -> None:
    x = torch.randn(2, 3)
    module: Any = add_tvm_dispatch(Holding(*WAYS[way]).eval(), x)
    module = copy.deepcopy(module) if of_copy else module
    with torch.no_grad():
        torch.testing.assert_close(module(x), eager(module)(x))
        assert not dispatch_report(module).fallbacks
        module.held = module.hold(module.a)
        torch.testing.assert_close(module(x), eager(module)(x))
        assert not dispatch_report(module).fallbacks
        module.held = module.hold(module.b)
        torch.testing.assert_close(module(x), eager(module)(x))
    assert dispatch_report(module).fallbacks == {"the attribute held changed": 1}


class WithActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.activations = [nn.Tanh()]

    def forward(self, x: torch.Tensor) -> Any:
        return self.activations[0](x)


def test_a_module_without_state_that_is_no_submodule_is_the_same_in_deep_copies() -> None:
    x = torch.randn(3)
    module = add_tvm_dispatch(WithActivation().eval(), x)
    for each in (module, copy.deepcopy(module)):
        torch.testing.assert_close(each(x), torch.tanh(x))
        assert not dispatch_report(each).fallbacks


class Given(nn.Module):
    def forward(self, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        return x if isinstance(layer, nn.Identity) else torch.tanh(x)


def test_another_module_as_an_argument_is_noticed() -> None:
    x, given = torch.randn(3), nn.Identity()
    module = add_tvm_dispatch(Given().eval(), (x, given))
    assert torch.equal(module(x, given), x)
    assert torch.equal(module(x, nn.Identity()), x)
    assert dispatch_report(module).fallbacks == {"an argument that is not a tensor differs": 1}


ACT: nn.Module = nn.LeakyReLU(0.1)


class Calling(nn.Module):
    """Calls a stateless module that is not a submodule, but in a global or in a list."""

    def __init__(self, *, globally: bool) -> None:
        super().__init__()
        self.globally = globally
        self.acts = [nn.LeakyReLU(0.1)]

    def forward(self, x: torch.Tensor) -> Any:
        return ACT(x) if self.globally else self.acts[0](x)


@pytest.mark.parametrize("globally", [True, False])
@pytest.mark.parametrize("of_copy", [False, True], ids=["module", "deep copy"])
def test_a_module_that_is_no_submodule_is_watched(globally: bool, of_copy: bool) -> None:
    x = torch.linspace(-2, 2, 5)
    module: Any = add_tvm_dispatch(Calling(globally=globally).eval(), x)
    module = copy.deepcopy(module) if of_copy else module
    torch.testing.assert_close(module(x), F.leaky_relu(x, 0.1))
    assert not dispatch_report(module).fallbacks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ACT if globally else module.acts[0], "negative_slope", 0.5)
        torch.testing.assert_close(module(x), F.leaky_relu(x, 0.5))
    torch.testing.assert_close(module(x), F.leaky_relu(x, 0.1))
    assert dispatch_report(module).tvm_calls == 2
    with pytest.MonkeyPatch.context() as patch:
        if globally:
            patch.setitem(globals(), "ACT", nn.Tanh())
        else:
            module.acts[0] = nn.Tanh()
        torch.testing.assert_close(module(x), torch.tanh(x))
    assert sum(dispatch_report(module).fallbacks.values()) == 2
