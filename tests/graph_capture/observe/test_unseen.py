"""Values that functions read which do not run while forward is observed: those of gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.core.torch_private import custom_op_definition
from tvmbridge.graph_capture.observe.strides import strides_asked
from tvmbridge.graph_capture.observe.unseen import gradient_functions

FACTORS = {"backward": 2.0, "saved": 1.0}


class Settings:
    """A plain object that a custom function keeps for its backward."""

    def __init__(self) -> None:
        self.factor = 2.0
        self.unread = 0.0


class Base:
    """A class whose data a subclass inherits."""

    factor = 2.0


class Inherited(Base):
    """A class that may get the data of its base class itself."""


SETTINGS = Settings()


class Kept(torch.autograd.Function):
    """A custom function whose backward reads an object that its forward was passed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, settings: Settings) -> torch.Tensor:  # type: ignore[override]
        ctx.settings = settings
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.settings.factor, None


@torch.library.custom_op("tvmbridge_unseen::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """Return twice ``x``; the gradient has other factors."""
    return x * 2


def _set_up(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.factor = FACTORS["saved"]


def _gradient(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient * FACTORS["backward"] * ctx.factor


doubled.register_fake(lambda x: torch.empty_like(x))
doubled.register_autograd(_gradient, setup_context=_set_up)


class Model(nn.Module):
    """Applies a function to a product with a weight."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.weight).sin()


def _kept(x: torch.Tensor) -> torch.Tensor:
    return Kept.apply(x, SETTINGS)  # type: ignore[no-any-return]


def _operator(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.tvmbridge_unseen.doubled(x)  # type: ignore[no-any-return]


def _by_name(x: torch.Tensor) -> torch.Tensor:
    return doubled(x)


def _inherited(x: torch.Tensor) -> torch.Tensor:
    return x * Inherited.factor


def _step(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    out = module(x)
    return [out, *torch.autograd.grad(out.sum(), [*module.parameters()])]


CASES: dict[str, tuple[Any, Callable[[pytest.MonkeyPatch], None]]] = {
    "an object of backward": (_kept, lambda p: p.setattr(SETTINGS, "factor", 3.0)),
    "backward of an operator": (_by_name, lambda p: p.setitem(FACTORS, "backward", 3.0)),
    "what an operator saves": (_operator, lambda p: p.setitem(FACTORS, "saved", 3.0)),
    "an inherited value": (_inherited, lambda p: p.setattr(Inherited, "factor", 3.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, change = CASES[name]
    plain, x = Model(function), torch.randn(3, 4, dtype=torch.float64)
    module = add_tvm_dispatch(Model(function), x)
    torch.testing.assert_close(_step(module, x), _step(plain, x))
    change(monkeypatch)
    torch.testing.assert_close(_step(module, x), _step(plain, x))
    report = dispatch_report(module)
    assert report.tvm_calls == 1
    assert sum(report.fallbacks.values()) == 1


def test_what_backward_does_not_read_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    module = add_tvm_dispatch(Model(_kept), x)
    monkeypatch.setattr(SETTINGS, "unread", 1.0)
    module(x)
    assert not dispatch_report(module).fallbacks


def test_functions_of_gradients() -> None:
    assert list(gradient_functions(doubled)) == [_gradient, _set_up]
    assert list(gradient_functions(torch.ops.tvmbridge_unseen.doubled)) == [_gradient, _set_up]
    assert Kept.__dict__["backward"] in list(gradient_functions(Kept))
    assert custom_op_definition(torch.ops.aten.sin.default) is None
    assert not list(gradient_functions(SimpleNamespace()))


class Asking(torch.autograd.Function):
    """A custom function whose gradient depends on the strides of the cotangent."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * (2 if gradient.is_contiguous() else 3)


def _asked(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * (2 if gradient.is_contiguous() else 3)


class _Cloning(torch.autograd.Function):
    """A custom function whose subclasses have a backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()


class Once(_Cloning):
    """Its backward is wrapped by a function of PyTorch."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (2 if gradient.is_contiguous() else 3)


class Helped(_Cloning):
    """Its backward calls a function of a class that asks for strides."""

    helper = staticmethod(_asked)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return Helped.helper(gradient)


class Statement(_Cloning):
    """Its backward asks only whether to copy."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if not gradient.is_contiguous():
            gradient = gradient.contiguous()
        return gradient.view(-1).view(gradient.shape) * 2


class Expression(_Cloning):
    """Its backward asks only whether to copy."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return (gradient if gradient.is_contiguous() else gradient.contiguous()) * 2


class Returned(_Cloning):
    """Its backward asks only whether to copy, in the expression that it returns."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient if gradient.is_contiguous() else gradient.contiguous()


class Doubled(_Cloning):
    """Its backward computes one thing for dense gradients and another for the others."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2 if gradient.is_contiguous() else gradient.contiguous() * 3


class Counted(_Cloning):
    """Its backward also counts the copy."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        factor = 2
        if not gradient.is_contiguous():
            gradient = gradient.contiguous()
            factor = 3
        return gradient * factor


def _losses(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    found = (module(x).sum(), module(x).square().sum())
    return [g for loss in found for g in torch.autograd.grad(loss, [*module.parameters()])]


@pytest.mark.parametrize(
    ("kind", "refused"),
    thinned(
        [(Asking, True), (Once, True), (Helped, True), (Statement, False), (Expression, False)], 2
    ),
)
def test_a_backward_that_asks_for_strides(kind: Any, refused: bool) -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    plain = Model(kind.apply)
    module = add_tvm_dispatch(copy.deepcopy(plain))
    torch.testing.assert_close(_losses(module, x), _losses(plain, x))
    reasons = " ".join(dispatch_report(module).fallbacks)
    assert ("asks for the strides of a tensor (is_contiguous)" in reasons) is refused
    with torch.no_grad():
        torch.testing.assert_close(module(x), plain(x))
    assert dispatch_report(module).tvm_calls == (1 if refused else 3)


@pytest.mark.parametrize(
    ("function", "asked"),
    [
        (Statement.backward, None),
        (Expression.backward, None),
        (Returned.backward, None),
        (Doubled.backward, "is_contiguous"),
        (Counted.backward, "is_contiguous"),
        (lambda x: x.stride(0), "stride"),
        (lambda x: (lambda y: y.storage_offset())(x), "storage_offset"),
        (lambda x: x.stride, None),
    ],
)
def test_strides_that_code_asks_for(function: Any, asked: str | None) -> None:
    assert strides_asked(function) == asked
