"""Side effects of forward are refused by name, or repeated at each call."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tvmbridge import CaptureError, add_tvm_dispatch, dispatch_report


def _x() -> torch.Tensor:
    return torch.linspace(-1, 2, 18).reshape(3, 6)


class Applied(nn.Module):
    """A module whose forward is ``function(self, x)``."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.calls = 0
        self.history: list[int] = []
        self.plain = torch.ones(6)
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def _counts(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.calls += 1
    return x * m.weight * torch.ones(m.calls).sum()  # a size, so it is no input


def _appends(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.history.append(1)
    return x * m.weight * len(m.history)


def _writes(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.plain.add_(1)
    return x * m.weight * m.plain


def _forks(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        x = x * torch.rand(6)
    return x * torch.rand(6)


def _seeds(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(4)
    return x * torch.rand(6) * m.weight


def _seeds_generator(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch.default_generator.manual_seed(4)
    return x * torch.rand(6) * m.weight


def _saves_otherwise(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        return (x * m.weight).tanh()


def _leaves_no_grad(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch.set_grad_enabled(False)
    return x * m.weight


REFUSED: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "counter": (_counts, "writes calls"),
    "list": (_appends, "writes history"),
    "plain tensor": (_writes, "writes into a tensor that is neither an input nor a buffer"),
    "python random": (lambda m, x: x * random.random(), "draws from random"),
    "numpy random": (lambda m, x: x * float(numpy.random.rand()), r"numpy\.random"),
    "seed": (_seeds, "seeds PyTorch's generator"),
    "fork": (_forks, "sets"),
    "default generator": (_seeds_generator, "sets the state of PyTorch's generator"),
    "initial seed": (lambda m, x: x * (torch.initial_seed() % 7), "reads the seed"),
    "saved tensors": (_saves_otherwise, "hooks on the tensors that autograd saves"),
    "gradient mode": (_leaves_no_grad, "leaves the gradient mode changed"),
    "shape of an argument": (lambda m, x: x.t_() @ m.weight[:3, None], "changes the shape or"),
    "strides of a tensor": (lambda m, x: x * m.plain.unsqueeze_(0), "changes the shape or strides"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_side_effects_are_refused_by_name(kind: str) -> None:
    function, reason = REFUSED[kind]
    module = Applied(function)
    before = {k: copy.deepcopy(v) for k, v in module.__dict__.items() if k[0] != "_"}
    state = torch.get_rng_state(), random.getstate()
    with pytest.raises(CaptureError, match=reason):
        add_tvm_dispatch(module, _x())
    after = {k: v for k, v in module.__dict__.items() if k[0] != "_"}
    assert torch.equal(before.pop("plain"), after.pop("plain"))
    assert before == after
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1] == random.getstate()


def test_generators_and_arrays_in_attributes_are_looked_into() -> None:
    def draws(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x * m.generator.random()

    def counts(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.generator += 1
        return x * float(m.generator[0])

    held = (numpy.random.default_rng(0), random.Random(0), numpy.zeros(1))
    for function, generator in zip((draws, draws, counts), held, strict=True):
        module = Applied(function)
        module.generator = generator
        with pytest.raises(CaptureError, match="writes generator"):
            add_tvm_dispatch(module, _x())
    assert held[2][0] == 0


def test_a_cache_is_made_by_the_first_call_and_then_served() -> None:
    def cached(m: Any, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(m, "made"):
            m.made = torch.full((6,), 2.0)
            m.rows = x.shape[0]
        return x * m.made * m.rows * m.weight

    module = add_tvm_dispatch(Applied(cached).eval(), _x())
    assert not hasattr(module, "made")
    for _ in range(3):
        torch.testing.assert_close(module(_x()).detach(), _x() * 6)
    assert dispatch_report(module).tvm_calls == 2
    assert module.rows == 3
    module.made = torch.ones(6)
    torch.testing.assert_close(module(_x()).detach(), _x() * 3)
    assert dispatch_report(module).tvm_calls == 3
