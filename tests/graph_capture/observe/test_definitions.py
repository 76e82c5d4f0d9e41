"""The guard notices if a function or class that forward calls by name is replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report


def _scaled(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return x * by


def _moved(x: torch.Tensor, by: float = 0.0) -> torch.Tensor:
    return x + by + 3


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * gradient * ctx.saved_tensors[0]


class Factor:
    def read(self) -> float:
        return 2.0


FACTOR = Factor()
REGISTRY: dict[str, Any] = {"absolute": torch.abs}
PARTIAL = functools.partial(_scaled, by=3.0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x - 1

    @property
    def root(self) -> torch.Tensor:
        return self.weight.abs()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = PARTIAL(_scaled(self.method(x * self.root))) * FACTOR.read()
        return F.relu(Squared.apply(y)) + REGISTRY["absolute"](x)


def _three(*_: Any) -> float:
    return 3.0


Patch = pytest.MonkeyPatch
THREEFOLD = staticmethod(lambda ctx, gradient: 3 * gradient)
CHANGES: dict[str, Callable[[Patch], Any]] = {
    "_scaled": lambda p: p.setitem(globals(), "_scaled", _moved),
    "PARTIAL": lambda p: p.setitem(globals(), "PARTIAL", functools.partial(_scaled, by=4.0)),
    "REGISTRY": lambda p: p.setitem(REGISTRY, "absolute", torch.tanh),
    "F.relu": lambda p: p.setattr(F, "relu", torch.tanh),
    "Model.method": lambda p: p.setattr(Model, "method", lambda self, x: x - 2),
    "Model.root": lambda p: p.setattr(Model, "root", property(lambda self: self.weight * 2)),
    "Model.forward": lambda p: p.setattr(Model, "forward", lambda self, x: x * self.weight),
    "Squared.backward": lambda p: p.setattr(Squared, "backward", THREEFOLD),
    "Factor.read": lambda p: p.setattr(Factor, "read", _three),
    "the code of a function": lambda p: p.setattr(_scaled, "__code__", _moved.__code__),
    "the defaults of a function": lambda p: p.setattr(_scaled, "__defaults__", (5.0,)),
    "the code of a method": lambda p: p.setattr(Factor.read, "__code__", _three.__code__),
}


def _step(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    out = module(x)
    return [out, *torch.autograd.grad(out.sum(), [*module.parameters()])]


def test_what_is_put_in_their_place_is_noticed() -> None:
    plain, x = Model().double(), torch.randn(3, 4, dtype=torch.float64)
    module = add_tvm_dispatch(Model().double(), x)
    module.load_state_dict(plain.state_dict())
    for served, (name, change) in enumerate(CHANGES.items(), 1):
        with Patch.context() as patch:
            change(patch)
            torch.testing.assert_close(_step(module, x), _step(plain, x), msg=name)
        fallbacks = dispatch_report(module).fallbacks
        assert sum(fallbacks.values()) == served, (name, fallbacks)
        torch.testing.assert_close(_step(module, x), _step(plain, x), msg=name)
        assert dispatch_report(module).tvm_calls == served, name


class Missing:
    """A stand-in for a package that is not installed: every attribute raises ImportError."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"no such package, asked for {name}")


_PACKAGE = Missing()


class ForTwoPackages(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * 2 if isinstance(x, torch.Tensor) else _PACKAGE.multiply(x, 2)


def test_what_raises_at_any_attribute_may_be_named() -> None:
    x = torch.randn(3)
    module = add_tvm_dispatch(ForTwoPackages().eval(), x)
    torch.testing.assert_close(module(x), 2 * x)
    assert not dispatch_report(module).fallbacks
