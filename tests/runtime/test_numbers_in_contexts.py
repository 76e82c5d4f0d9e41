"""Numbers that custom autograd functions keep in their contexts are inputs of compiled code."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.test_changing_attributes import _agree, _pair
from tests.thinned import but_slow
from tvmbridge import add_tvm_dispatch, dispatch_report

Backward = Callable[[Any, torch.Tensor], torch.Tensor]


def _function(backward: Backward, keep: Callable[[float], Any] = lambda alpha: alpha) -> Any:
    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, alpha: float) -> torch.Tensor:
            ctx.alpha = keep(alpha)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return backward(ctx, gradient), None

    return Reversed


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, alpha: float) -> torch.Tensor:
        return x * alpha

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.alpha = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.alpha, None


FUNCTIONS = {
    "reversed": _function(lambda ctx, g: -ctx.alpha * g),
    "computed": _function(lambda ctx, g: g * ctx.alpha, lambda alpha: 1 - 2 * alpha),
    "in a tuple": _function(lambda ctx, g: g * ctx.alpha[0] + ctx.alpha[1], lambda a: (a, -a)),
    "clamped": _function(lambda ctx, g: g.clone().mul_(2).clamp(max=abs(ctx.alpha))),
    "of a context": _Scaled,
}


class Domain(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.body, self.function, self.alpha = nn.Linear(4, 3), function, 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x).tanh()
        return self.function.apply(h, self.alpha) + self.function.apply(h * 2, 3 * self.alpha)


@pytest.mark.parametrize("name", but_slow(FUNCTIONS, *list(FUNCTIONS)[:-1]))
def test_one_code_serves_all_numbers(name: str) -> None:
    eager, served = _pair(Domain(FUNCTIONS[name]).double())
    for alpha in (0.5, 0.1, 0.0, -2.0, 3.0):
        eager.alpha = served.alpha = alpha
        x = torch.randn(3, 4, dtype=torch.float64)
        gradients = []
        for module in (eager, served):
            module.zero_grad()
            module(x).square().sum().backward()
            gradients.append([p.grad.clone() for p in module.parameters()])
        torch.testing.assert_close(gradients[1], gradients[0])
    report = dispatch_report(served)
    assert report.tvm_calls == 5
    assert len(report.specializations) == 1


class Given(Domain):
    def forward(self, x: torch.Tensor, alpha: float) -> torch.Tensor:  # type: ignore[override]
        return self.function.apply(self.body(x), alpha)


REFUSED = {
    "branches": (lambda ctx, g: g if ctx.alpha > 1 else -g, "the backward .* branches on it"),
    "text": (lambda ctx, g: g * float(ctx.alpha), "forward converts it to a float"),
}


@pytest.mark.parametrize("name", but_slow(REFUSED, "branches"))
def test_a_backward_that_needs_the_value_is_right_and_named(name: str) -> None:
    backward, why = REFUSED[name]
    eager = Given(_function(backward))
    served = add_tvm_dispatch(copy.deepcopy(eager), on_fallback="silent")
    for alpha in (0.5, 2.0, -3.0, 4.0):
        x = torch.randn(3, 4)
        gradients = []
        for module in (eager, served):
            module.zero_grad()
            module(x, alpha).square().sum().backward()
            gradients.append(module.body.weight.grad.clone())
        torch.testing.assert_close(gradients[1], gradients[0])
    (example,) = dispatch_report(served).examples.values()
    assert re.search(why, example)


def test_a_number_that_is_kept_elsewhere_too_stays_a_constant() -> None:
    kept: list[float] = []

    def keep(alpha: float) -> float:
        kept.append(alpha)
        return alpha

    eager, served = _pair(Domain(_function(lambda ctx, g: g * ctx.alpha, keep)))
    for alpha in (0.5, 0.1, 0.2):
        eager.alpha = served.alpha = alpha
        kept.clear()
        _agree(eager, served)
        assert kept == [alpha, 3 * alpha] * 2
