"""``associative_scan`` agrees with a loop in values and gradients, in both of its modes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan, associative_scan_op
from torch._higher_order_ops.out_dtype import out_dtype

from tvmbridge import UnsupportedOperatorError, add_tvm_dispatch, dispatch_report

Function = Callable[["Model", torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """A layer and a number, which ``function(model, x)`` may use."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.share = nn.Parameter(torch.tensor(0.5))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x * 2)


def _generic(model: Model, x: torch.Tensor) -> torch.Tensor:
    def step(one: Any, other: Any) -> Any:
        return one[0] * other[0], one[1] * other[0] + other[1]

    given = (x.sigmoid() * model.share, model.layer(x))
    states: torch.Tensor = associative_scan(step, given, 0, combine_mode="generic")[1]
    return states


def _reversed(model: Model, x: torch.Tensor) -> torch.Tensor:
    def step(one: Any, other: Any) -> Any:
        return {"u": one["u"] * other["u"], "v": one["v"] * other["u"] + other["v"]}

    given = {"u": (x.sigmoid() * model.share).t().flip(1), "v": model.layer(x).t().flip(1)}
    found: Any = associative_scan(step, given, -1, reverse=True, combine_mode="generic")
    states: torch.Tensor = found["v"].flip(1).t()
    return states


def _pointwise(model: Model, x: torch.Tensor) -> torch.Tensor:
    """Call the operator of ``combine_mode="pointwise"``, a mode that PyTorch has on GPUs alone."""

    def step(*leaves: torch.Tensor) -> list[torch.Tensor]:
        return [leaves[0] * leaves[2], leaves[1] * leaves[2] + leaves[3]]

    operands = [x.sigmoid() * model.share, model.layer(x)]
    states: torch.Tensor = associative_scan_op(step, operands, ())[1]
    return states


def _by_a_loop(model: Model, x: torch.Tensor) -> torch.Tensor:
    factors, terms = x.sigmoid() * model.share, model.layer(x)
    states = [terms[0]]
    for factor, term in zip(factors[1:], terms[1:], strict=True):
        states.append(states[-1] * factor + term)
    return torch.stack(states)


FORMS: dict[str, Function] = {"generic": _generic, "reversed": _reversed, "pointwise": _pointwise}


def _backward(model: Model, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Return the result, and the gradients of ``x`` and the parameters."""
    x = x.clone().requires_grad_()
    result = model(x)
    result.square().sum().backward()
    return [result.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_are_those_of_a_loop(form: str) -> None:
    """The loop is the reference: PyTorch's own gradient of the operator leaves terms out."""
    model = Model(FORMS[form]).double().train()
    reference = copy.deepcopy(model)
    reference.function = _by_a_loop
    add_tvm_dispatch(model, torch.randn(5, 4, dtype=torch.float64).requires_grad_())
    x = torch.randn(5, 4, dtype=torch.float64)
    torch.testing.assert_close(_backward(model, x), _backward(reference, x))
    assert dispatch_report(model).fallbacks == {}


@pytest.mark.parametrize("form", FORMS)
def test_each_length_has_code_of_its_own(form: str) -> None:
    model = Model(FORMS[form]).eval()
    reference = copy.deepcopy(model)
    reference.function = _by_a_loop
    add_tvm_dispatch(model, dynamic_shapes="auto")
    with torch.no_grad():
        for length in (5, 6, 1):
            x = torch.randn(length, 4)
            torch.testing.assert_close(model(x), reference(x))


def test_an_operator_that_no_trace_follows_is_refused_by_name() -> None:
    def function(model: Model, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = out_dtype(torch.ops.aten.mul.Tensor, torch.float64, x, x)
        return found

    with pytest.raises(UnsupportedOperatorError, match=r"higher_order\.out_dtype"):
        add_tvm_dispatch(Model(function).eval(), torch.rand(4, 4))
