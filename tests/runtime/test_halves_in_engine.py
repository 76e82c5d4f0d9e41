"""Stages as the pipelining engine differentiates them, made of dispatched and eager modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

from tvmbridge import CompileOptions, add_tvm_dispatch, dispatch_report
from tvmbridge.runtime.halves import weights_follow_inputs


class Layer(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x) * self.scale)


class Pair(nn.Module):
    """Two outputs, of which the second is no function of all weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.other = Layer()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.layer(x)
        return self.other(hidden), hidden * 2


class Mixed(nn.Module):
    """Dispatched layers, and weights of the stage's own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()
        self.between = nn.Linear(4, 4)
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x + self.shift)).sin())


class Twice(nn.Module):
    """A dispatched layer that runs twice: one group of parameters, two nodes.

    The engine differentiates no such module in eager PyTorch: it frees nodes that it needs again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x).cos())


class Checkpointed(Mixed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def frozen() -> nn.Module:
    module = Layer()
    module.linear.weight.requires_grad_(False)
    return module


def whole(module: nn.Module) -> list[nn.Module]:
    return [module]


def layers(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.modules() if isinstance(m, Layer)]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], list[nn.Module]]]] = {
    "one module": (Layer, whole),
    "two outputs": (Pair, whole),
    "frozen": (frozen, whole),
    "mixed": (Mixed, layers),
    "twice": (Twice, layers),
    "checkpointed": (Checkpointed, layers),
}


def loss_of(module: nn.Module, source: torch.Tensor) -> torch.Tensor:
    outputs = module(source)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.stack([(o * o).sum() for o in outputs]).sum()


def in_halves(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Run one micro-batch of a last stage; return the gradients of its input and weights."""
    source = x.clone().requires_grad_()
    loss = loss_of(module, source)
    parameters = [p for p in module.parameters() if p.requires_grad]
    (dx,), groups = stage_backward_input([loss], None, [source], iter(parameters))
    stage_backward_weight(iter(parameters), groups)
    found = [dx, *(p.grad for p in parameters)]
    module.zero_grad()
    return found


def at_once(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    source = x.clone().requires_grad_()
    loss_of(module, source).backward()
    found = [source.grad, *(p.grad for p in module.parameters() if p.requires_grad)]
    module.zero_grad()
    return found


SLOW = ("one module", "frozen", "checkpointed")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CASES]
)
def test_gradients_are_those_of_eager_stages(name: str) -> None:
    if torch.__version__.startswith("2.11."):
        pytest.skip("the engine of PyTorch 2.11 takes no edge to a node of a Python function")
    torch.manual_seed(0)
    make, chosen = CASES[name]
    eager = make().double()
    ours = copy.deepcopy(eager)
    x = torch.randn(3, 4, dtype=torch.float64)
    for module in chosen(ours):
        sample = x.clone().requires_grad_()
        add_tvm_dispatch(module, (sample,), options=CompileOptions(only_if_faster=False))
    freed = nullcontext() if name == "twice" else weights_follow_inputs()
    for context in (nullcontext(), nullcontext(), nullcontext(), freed):
        with context:
            found = in_halves(ours, x)
        torch.testing.assert_close(found, at_once(eager, x), rtol=1e-12, atol=1e-12)
        x = x + 0.5
    reports = [dispatch_report(module) for module in chosen(ours)]
    assert all(report.fallbacks == {} for report in reports)
    halves = [report.specializations[0].backward_halves for report in reports]
    if name == "checkpointed":
        assert halves == [{"whole": 4}] * 2
    elif name != "twice":
        # The first micro-batch does not know that the gradients of weights are asked for later.
        assert halves == [{"whole": 1, "inputs": 3, "weights": 3}] * len(halves)
