"""Checked calls of correct modules: nothing is raised, and results and state are the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.thinned import thinned
from tvmbridge import NumericsError, add_tvm_dispatch, dispatch_report


class Counting(nn.Module):
    """A module that counts its calls in a buffer, in place, and scales by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return {"y": self.linear(x + torch.rand_like(x)) - self.mean, "calls": self.calls.clone()}


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


class Centered(nn.Module):
    """A module whose bias gradient is a sum of cotangents that cancel almost to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y - y.detach().mean(0)  # type: ignore[no-any-return]


def train(module: nn.Module, x: torch.Tensor, steps: int = 3) -> dict[str, torch.Tensor]:
    """Train some steps; return parameters, buffers and the generator's state."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        result = module(torch.randn_like(x))
        (result["y"] if isinstance(result, dict) else result).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**module.state_dict(), "generator": torch.get_rng_state()}


@pytest.mark.parametrize(
    ("module", "x"),
    thinned(
        [
            (convolutions(), torch.randn(3, 2, 6, 6)),
            (Counting(), torch.randn(4, 6)),
            (Centered(), torch.randn(4, 6)),
        ],
        3,
    ),
    ids=["convolutions", "counting", "centered"],
)
def test_steps_leave_what_unchecked_ones_leave(module: nn.Module, x: torch.Tensor) -> None:
    checked = add_tvm_dispatch(module, x, options={"check": "always"})
    unchecked = add_tvm_dispatch(copy.deepcopy(remove(module)), x)
    ours, theirs = train(checked, x), train(unchecked, x)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    report = dispatch_report(checked)
    assert report.tvm_calls == report.checked_calls == 3
    assert [s.checked_gradients for s in report.specializations] == [3]
    assert not report.fallbacks
    assert not report.unchecked
    assert "checked against PyTorch: 3, backward: 3" in str(report)
    assert dispatch_report(unchecked).checked_calls == 0


def remove(module: nn.Module) -> nn.Module:
    """Return a copy of the module without its dispatch."""
    copied = copy.deepcopy(module)
    del copied.__dict__["forward"]
    return copied


def test_calls_at_growing_distances_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMBRIDGE_CHECK", "1")
    module = add_tvm_dispatch(nn.Linear(3, 3).eval(), torch.randn(2, 3))
    with torch.no_grad():
        for _ in range(9):
            module(torch.randn(2, 3))
    assert dispatch_report(module).checked_calls == 4
    # A copy counts its own calls.
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied(torch.randn(2, 3))
    assert dispatch_report(copied).checked_calls == 1


class Caching(nn.Module):
    """A module that appends to a list argument, and returns an argument."""

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> tuple[Any, ...]:
        cache.append(x * 2)
        return x, sum(cache), len(cache)


def test_arguments_that_forward_changes() -> None:
    x = torch.randn(3)
    module = add_tvm_dispatch(Caching().eval(), (x, [x]), options={"check": "always"})
    cache = [x]
    same, total, count = module(x, cache)
    assert same is x
    assert count == len(cache) == 2
    assert torch.equal(total, x + 2 * x)
    assert torch.equal(cache[1], 2 * x)
    assert dispatch_report(module).checked_calls == 1


class TwoHeads(nn.Module):
    """A module with two differentiable outputs, one that is not, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.a.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.a(x), self.b(x), x.argmax()


def test_outputs_without_a_cotangent_and_frozen_parameters() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    module = add_tvm_dispatch(TwoHeads(), x, options={"check": "always"})
    first, second, _ = module(x)
    second.sum().backward(retain_graph=True)
    assert module.a.weight.grad is None
    (first * second).sum().backward()
    assert dispatch_report(module).specializations[0].checked_gradients == 2


def test_tied_weights_have_one_gradient() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    x = torch.randn(2, 4)
    add_tvm_dispatch(module, x, options={"check": "always"})
    module(x).sum().backward()
    assert dispatch_report(module).specializations[0].checked_gradients == 1


def test_forward_that_is_a_closure_over_the_module_is_not_checked() -> None:
    module = nn.Linear(3, 3).eval()
    own = module.forward
    module.forward = lambda x: own(x) * 2  # type: ignore[method-assign]
    x = torch.randn(2, 3)
    add_tvm_dispatch(module, x, options={"check": "always"})
    with torch.no_grad():
        module(x)
    (reason,) = dispatch_report(module).unchecked
    assert "forward is a closure over it" in reason


def test_a_module_that_cannot_be_copied_is_served_and_counted() -> None:
    module = nn.Linear(3, 3).eval()
    x = torch.randn(2, 3)
    add_tvm_dispatch(module, x, options={"check": "always"})
    module.refuses = (n for n in ())  # type: ignore[assignment]
    with torch.no_grad():
        module(x)
    report = dispatch_report(module)
    assert report.tvm_calls == 1
    assert report.checked_calls == 0
    ((reason, count),) = report.unchecked.items()
    assert "the module cannot be copied: " in reason
    assert count == 1
    assert reason[:60] in str(report).replace("\n", " ")


class Refusing(nn.Module):
    """A module that raises for certain values of its input, whatever the shapes."""

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(x, table)


def test_what_eager_refuses() -> None:
    table = torch.randn(3, 2)
    module = add_tvm_dispatch(
        Refusing().eval(), (torch.tensor([0, 2]), table), options={"check": "always"}
    )
    with pytest.raises((NumericsError, IndexError), match="out of range"):
        module(torch.tensor([0, 3]), table)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_is_told_of_no_check(reentrant: bool) -> None:
    module, x = nn.Linear(4, 4), torch.randn(4, 4, requires_grad=True)
    plain = copy.deepcopy(module)
    add_tvm_dispatch(module, x, options={"check": "growing"})
    for called in (module, plain):
        for _ in range(3):
            checkpoint(called, x, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close(module.weight.grad, plain.weight.grad)
    assert bool(dispatch_report(module).unchecked) is not reentrant
