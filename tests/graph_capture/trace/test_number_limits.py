"""Tests of values for which PyTorch treats a number otherwise than a tensor of its value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.core.errors import NumberReadError
from tvmbridge.core.number_inputs import FloatInput, IntInput, as_tensor
from tvmbridge.graph_capture.capture import capture

Function = Callable[..., Any]
INTEGERS = (3, 0, -1, 127, 300, 70000, (1 << 24) + 1)
FLOATS = (0.5, 0.1, 0.0, -1.5, 1e5, math.inf, math.nan)
MARKS: dict[type, type] = {int: IntInput, float: FloatInput}


class Computing(nn.Module):
    """Calls a function with the arguments."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, t: Any) -> Any:
        return self.function(x, t)


def _in_place(x: torch.Tensor, t: float) -> tuple[torch.Tensor, ...]:
    clamped, scaled, divided = x.clone(), x.half(), x.bfloat16()
    clamped.clamp_(-1, t)
    scaled.mul_(t)
    divided /= t
    return clamped, scaled, divided


# Each function with the class of the number, and the values that it leaves out.
LIMITED: dict[str, tuple[Function, type, tuple[float, ...]]] = {
    "half": (lambda x, t: (x.half() * t, t / x.half(), x.half() / t), float, ()),
    "in place": (_in_place, float, ()),
    "clamp of bytes": (lambda x, t: x.abs().byte().clamp(-1, t), float, ()),
    "clamp of small integers": (lambda x, t: x.char().clamp(max=t), int, INTEGERS[4:]),
    "where in half": (lambda x, t: torch.where(x > 0, x.half(), t), float, FLOATS[4:]),
    "odd exponent": (lambda x, t: x**t, int, INTEGERS[6:]),
    "root of infinity": (lambda x, t: x**t, float, FLOATS[5:]),
    "power of a quotient": (lambda x, t: x * (t / 8) ** 2, int, ()),
}


@pytest.mark.parametrize("name", LIMITED)
def test_served_values_compute_as_in_eager_pytorch(name: str) -> None:
    function, kind, left_out = LIMITED[name]
    model, values = Computing(function), INTEGERS if kind is int else FLOATS
    x = torch.tensor([-math.inf, -2.0, -1.0, 0.0, 1e-5, 3.0])
    captured = capture(model, (x, MARKS[kind](values[0])), needs_grad=False)
    graph = captured.program.module(check_guards=False)
    served = captured.convention.numbers[1]
    assert [v for v in values if not served.holds(v)] == [*left_out]
    for value in filter(served.holds, values):
        torch.testing.assert_close(graph(x, as_tensor(value)), model(x, value), equal_nan=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, t: torch.div(x.long(), t, rounding_mode="floor"),
        lambda x, t: x[0].char() / t,
        lambda x, t: x[0].half() * t,
        lambda x, t: x.half() ** (t / 3),
        lambda x, t: x.half().clamp(max=t * 2),
        lambda x, t: torch.lerp(x.half(), x.half(), t),
    ],
)
def test_functions_that_treat_a_tensor_otherwise_are_refused(function: Function) -> None:
    with pytest.raises(NumberReadError, match="passes it to"):
        capture(Computing(function), (torch.ones(3), IntInput(3)), needs_grad=False)


def test_a_divisor_that_lost_its_last_bits_raises_as_in_eager() -> None:
    module = Computing(lambda x, t: x * (1 / ((t + 1) - 1)))
    plain = Computing(module.function)
    x = torch.ones(3)
    add_tvm_dispatch(module, on_fallback="silent")
    for number in (0.5, 0.25, 0.125, 0.3, 0.7):
        torch.testing.assert_close(module(x, number), plain(x, number), rtol=0, atol=0)
    with pytest.raises(ZeroDivisionError):
        module(x, 1e-30)
    assert dispatch_report(module).tvm_calls >= 4


def test_a_container_that_holds_a_number_is_not_changed_unnoticed() -> None:
    def counting(x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        state["last"] = x * state["t"]
        return x + 1

    given = (torch.ones(3), {"t": FloatInput(0.5)})
    with pytest.raises(NumberReadError, match="changes an argument that holds it"):
        capture(Computing(counting), given, needs_grad=False)
