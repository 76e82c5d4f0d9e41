"""Modules that cannot be captured are refused, and generators keep their state."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import tvmbridge
from tests.thinned import thinned
from tvmbridge.core.errors import BridgeError, CaptureError


class Masks(nn.Module):
    """Masks columns at random in train mode, with the generator of ``random`` or NumPy."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.source = source

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            if self.source == "random":
                keep = [random.random() > 0.5 for _ in range(4)]
            else:
                keep = (numpy.random.rand(4) > 0.5).tolist()
            x = x * torch.tensor(keep)
        return self.linear(x)


@pytest.mark.parametrize("source", ["random", "numpy.random"])
def test_draws_of_other_generators_are_refused(source: str) -> None:
    module, x = Masks(source).train(), torch.randn(2, 4)
    states = random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore[call-overload]
    with pytest.raises(CaptureError, match=f"draws from {source}, which"):
        tvmbridge.add_tvm_dispatch(module, x)
    assert states == (random.getstate(), numpy.random.get_state()[1].tolist())  # type: ignore[call-overload]
    tvmbridge.add_tvm_dispatch(module.eval(), x)


class Calls(nn.Module):
    """A module whose forward is a function of its layer and the arguments."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)

    def forward(self, *args: Any) -> torch.Tensor:
        return self.function(self.linear, *args)


def _writes_a_parameter(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    linear.weight.data.mul_(0.9)
    return linear(x)  # type: ignore[no-any-return]


def _force(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(linear(x).square().sum(), x)[0]


def _backward(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        linear(x).sum().backward()
    return x


def _with_gradients(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return linear(x)  # type: ignore[no-any-return]


def _by_transform(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda y: linear(y).sum())(x)


REFUSED: dict[str, Callable[..., torch.Tensor]] = {
    "writes into the parameter linear.weight; compiled code writes only": _writes_a_parameter,
    "uses torch.autograd.grad, which.*test_refusal": _force,
    "uses Tensor.backward, which.*test_refusal": _backward,
    "turns gradients on where they are off": _with_gradients,
    "differentiates by torch.func": _by_transform,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_the_reason_is_told_by_name(reason: str) -> None:
    module = Calls(REFUSED[reason]).eval()
    weight = module.linear.weight.detach().clone()
    with pytest.raises(BridgeError, match=reason):
        tvmbridge.add_tvm_dispatch(module, torch.randn(2, 4))
    assert "forward" not in module.__dict__
    assert torch.equal(module.linear.weight, weight)


def test_a_tensor_given_twice_is_served_where_it_is_not() -> None:
    """A sample with one tensor for two arguments; later calls pass two, and a ``torch.Size``."""

    def add(linear: nn.Linear, x: torch.Tensor, y: torch.Tensor, size: Any) -> torch.Tensor:
        x.add_(1)
        return (linear(x) + y).view(size)

    plain = Calls(add).eval()
    module, x = copy.deepcopy(plain), torch.ones(2, 4)
    with torch.no_grad():
        tvmbridge.add_tvm_dispatch(module, (x, x, torch.Size([8])))
        for twice in (True, False):
            found = []
            for called in (module, plain):
                x = torch.ones(2, 4)
                y = x if twice else torch.ones(2, 4)
                found.append([called(x, y, torch.Size([8])), x, y])
            torch.testing.assert_close(*found)
    report = tvmbridge.dispatch_report(module)
    assert report.tvm_calls == sum(report.fallbacks.values()) == 1


def test_a_dispatched_module_is_not_scripted() -> None:
    module = tvmbridge.add_tvm_dispatch(nn.Sequential(nn.Linear(4, 4)).eval(), torch.randn(2, 4))
    with pytest.raises(BridgeError, match=r"torch\.jit\.script cannot read.*remove_tvm_dispatch"):
        torch.jit.script(module)


class Asks(nn.Module):
    calls = 0

    def __init__(self, does: str) -> None:
        super().__init__()
        self.does = does
        self.register_buffer("least", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        compiled = torch.compiler.is_compiling()
        if self.does == "counts" and not compiled:
            self.calls += 1
        if self.does == "looks" and not compiled:
            assert (x > self.least).all()
        if self.does == "draws" and not compiled:
            x = x + torch.rand_like(x)
        return x * (2 if compiled or self.does != "computes" else 3) * x.sigmoid()


def test_what_forward_does_where_it_is_not_compiled_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"asks whether it is compiled .*follow"):
        tvmbridge.add_tvm_dispatch(Asks("looks"), torch.rand(3) + 1)


@pytest.mark.parametrize(
    ("does", "joint"),
    thinned([("nothing", "aot"), ("computes", "auto"), ("draws", "aot"), ("counts", "auto")], 2),
)
def test_the_way_where_forward_is_not_compiled_is_compiled(does: str, joint: str) -> None:
    own = Asks(does).double()
    sample = torch.rand(3, dtype=torch.float64, requires_grad=True)
    module = copy.deepcopy(own)
    tvmbridge.add_tvm_dispatch(module, sample, options={"joint": joint})
    results = []
    for each in (own, module):
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        torch.manual_seed(3)
        y = each(x)
        y.sum().backward()
        results.append((y, x.grad, torch.rand(2)))
    torch.testing.assert_close(*results, rtol=1e-12, atol=0)
    with torch.no_grad():
        torch.manual_seed(3)
        torch.testing.assert_close(module.eval()(sample), results_of(own.eval(), sample))
    assert not tvmbridge.dispatch_report(module).fallbacks


def results_of(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return module(x)  # type: ignore[no-any-return]


class Recorder:
    def __init__(self) -> None:
        self.shapes: list[Any] = []

    def called(self, linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        self.shapes.append(x.shape)
        return linear(x)  # type: ignore[no-any-return]


def test_a_method_of_an_object_that_takes_notes_is_refused() -> None:
    recorder = Recorder()
    with pytest.raises(CaptureError, match="writes function"):
        tvmbridge.add_tvm_dispatch(Calls(recorder.called), torch.randn(2, 4))
    assert not recorder.shapes


def test_hooks_that_cannot_be_traced_are_refused_and_not_called() -> None:
    calls: list[Any] = []
    module, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    handle = module[0].register_forward_hook(lambda *given: calls.append(given))
    with pytest.raises(CaptureError, match="outside of the module"):
        tvmbridge.add_tvm_dispatch(module, x)
    assert not calls
    handle.remove()
    handle = module[0].register_full_backward_hook(lambda *given: calls.append(given))
    with pytest.raises(CaptureError, match="its submodule 0 has hooks that are no plain"):
        tvmbridge.add_tvm_dispatch(module, x)
    assert not calls
    handle.remove()
    tvmbridge.add_tvm_dispatch(module, x)
    module[0].register_forward_hook(lambda *given: calls.append(given))
    with torch.no_grad():  # a mode without compiled code
        module(x)
    assert len(calls) == 1
    assert tvmbridge.dispatch_report(module).fallbacks == {"the hooks of a submodule changed": 1}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([torch.ones(2, 4)], "a list is one positional argument: pass a tuple"),
        ({"input": torch.ones(2, 4)}, "a dict is one positional argument: pass keyword"),
        (numpy.ones((2, 4), "float32"), "a numpy array is no tensor: pass torch.from_numpy"),
        ((numpy.ones((2, 4), "float32"),), "a numpy array is no tensor: pass torch.from_numpy"),
        (torch.ones(2, 5), "pass arguments it accepts"),
    ],
)
def test_a_refused_sample_says_what_to_pass_instead(given: Any, says: str) -> None:
    module = nn.Linear(4, 4)
    with pytest.raises(CaptureError, match=says):
        tvmbridge.add_tvm_dispatch(module, given)
    report = tvmbridge.compare(module, given)
    assert says in report.reason
    assert "agrees" not in str(report)


def test_an_operator_without_a_kernel_is_no_fault_of_the_sample() -> None:
    class Calls(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError("Could not run 'mine::op' with arguments from 'CPU'")

    with pytest.raises(CaptureError, match=r"no kernel.*mine::op.*torch\.library") as raised:
        tvmbridge.add_tvm_dispatch(Calls(), torch.ones(2))
    assert "sample" not in str(raised.value)


def test_a_loop_over_experts_says_what_to_do() -> None:
    class Experts(nn.Module):
        def __init__(self, implementation: str) -> None:
            super().__init__()
            self.implementation = implementation

        def get_experts_implementation(self) -> dict[str, str]:
            return {"": self.implementation}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for row in (x.sum(-1) > 0).nonzero():
                x = x + x[row[0]]
            return x

    x = torch.randn(4, 4)
    with pytest.raises(CaptureError, match=r'set_experts_implementation\("grouped_mm"\)'):
        tvmbridge.add_tvm_dispatch(Experts("eager").eval(), x, on_break="forward")
    with pytest.raises(CaptureError, match=r"^(?!.*set_experts)"):
        tvmbridge.add_tvm_dispatch(Experts("other").eval(), x, on_break="forward")
