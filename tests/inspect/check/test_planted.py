"""Faults planted in dispatched modules: a checked call names the wrong value or operator."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from tvm import relax

from tvmbridge import NumericsError, add_tvm_dispatch
from tvmbridge.compiler.executable import LoadedModule
from tvmbridge.frontend.registry import CONVERTERS
from tvmbridge.runtime import primals
from tvmbridge.runtime.entry import CompiledEntry
from tvmbridge.runtime.outputs import Outputs

aten = torch.ops.aten


class Small(nn.Module):
    """A module with two linear layers, two dropouts of one shape, and two outputs of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.drop(nn.functional.gelu(self.first(x)))
        return hidden, self.drop(torch.tanh(self.second(hidden)))


def step(module: nn.Module, x: torch.Tensor) -> None:
    outputs = module(x)
    sum(o.square().sum() for o in outputs).backward()


def checked(module: nn.Module, x: torch.Tensor) -> nn.Module:
    return add_tvm_dispatch(module, x, options={"check": "first"})


def test_a_converter(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(ctx: Any, node: Any, x: Any, **_: Any) -> Any:
        return relax.op.nn.gelu_tanh(ctx.value(x))

    right = CONVERTERS[aten.gelu.default]
    monkeypatch.setitem(CONVERTERS, aten.gelu.default, replace(right, function=wrong))
    x = torch.randn(5, 8)
    module = checked(Small(), x)
    with pytest.raises(NumericsError) as caught:
        step(module, x)
    message = str(caught.value)
    assert message.startswith("call 1 of Small (train) by compiled code: output[0] departs")
    assert "rounding explains" in message
    assert "first departing operator: mistake in output[0]: stage imported" in message
    assert "operator aten.gelu.default" in message
    assert "nn.functional.gelu(self.first(x))" in message


@pytest.mark.slow
@pytest.mark.usefixtures("lost_scale")
def test_a_gradient_rule() -> None:
    x = torch.randn(5, 8)
    module = checked(Small(), x)
    outputs = module(x)
    with pytest.raises(NumericsError) as caught:
        sum(o.square().sum() for o in outputs).backward()
    message = str(caught.value)
    assert ": gradient of first.weight departs from PyTorch by" in message
    assert "operator gradient of aten.tanh.default" in message
    # The second call is not checked, so it must not raise.
    step(module, x)


def test_a_wrong_buffer_from_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LoadedModule.call

    def wrong(self: LoadedModule, name: str, tensors: Any) -> list[torch.Tensor]:
        results = right(self, name, tensors)
        if name == "forward":
            results[0], results[1] = results[1], results[0]
        return results

    x = torch.randn(5, 8)
    module = checked(Small().eval(), x)
    monkeypatch.setattr(LoadedModule, "call", wrong)
    with torch.no_grad(), pytest.raises(NumericsError) as caught:
        module(x)
    assert ": output[0] departs from PyTorch by" in str(caught.value)
    assert "stage compiled" in str(caught.value)


def test_running_statistics_written_back_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Outputs.assemble

    def wrong(self: Outputs, results: Any, leaves: Any, tensors: Any, arguments: Any) -> Any:
        returned = right(self, results, leaves, tensors, arguments)
        with torch.no_grad():
            tensors[self._state.names.index("1.running_mean")].mul_(1.01)
        return returned

    x = torch.randn(6, 4)
    module = checked(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), x)
    monkeypatch.setattr(Outputs, "assemble", wrong)
    with pytest.raises(NumericsError) as caught:
        module(x)
    assert ": 1.running_mean after the call departs from PyTorch by" in str(caught.value)
    assert "the departure is in no operator" in str(caught.value)


@pytest.mark.slow
def test_exchanged_masks(plant_variant: Callable[[Callable[[CompiledEntry], None]], None]) -> None:
    x = torch.randn(5, 8)

    def exchange(entry: CompiledEntry) -> None:
        entry.given.noise.reverse()

    plant_variant(exchange)
    module = checked(Small(), x)
    with pytest.raises(NumericsError, match=r": output\[0\] departs from PyTorch by"):
        module(x)


@pytest.fixture
def plant_variant(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Callable[[CompiledEntry], None]], None]:
    """Return a function that plants a change in each new compiled entry."""

    def plant(change: Callable[[CompiledEntry], None]) -> None:
        right = CompiledEntry.__init__

        def wrong(self: CompiledEntry, *args: Any) -> None:
            right(self, *args)
            change(self)

        monkeypatch.setattr(CompiledEntry, "__init__", wrong)

    return plant


def test_a_draw_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    right = primals.draw_noise

    def wrong(*args: Any) -> list[torch.Tensor]:
        drawn = right(*args)
        torch.rand(1)
        return drawn

    monkeypatch.setattr(primals, "draw_noise", wrong)
    x = torch.randn(5, 8)
    module = checked(Small(), x)
    with pytest.raises(NumericsError, match="generator after the call is in another state"):
        module(x)


def test_a_mistake_that_rounding_would_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check an error below this value's float32 rounding, which the check in float64 finds."""
    right = CONVERTERS[aten.tanh.default]

    def wrong(ctx: Any, node: Any, x: Any) -> Any:
        factor = relax.const(1 + 6e-6, str(ctx.value(x).ty.dtype))
        return relax.op.multiply(ctx.emit(relax.op.tanh(ctx.value(x))), factor)

    monkeypatch.setitem(CONVERTERS, aten.tanh.default, replace(right, function=wrong))

    class Rough(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(3e1 + x - 3e1)

    x = torch.randn(64)
    module = checked(Rough().eval(), x)
    with torch.no_grad(), pytest.raises(NumericsError) as caught:
        module(x)
    assert re.search(r"departs from PyTorch by .*, and by .* in float64; ", str(caught.value))
    assert "operator aten.tanh.default" in str(caught.value)
