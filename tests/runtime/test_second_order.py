"""Double backward: gradient penalties, forces, Hessians."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import eager
from tvmbridge import BridgeError, add_tvm_dispatch, dispatch_report


class Energy(nn.Module):
    """Returns a number for each row, as a view of another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.SiLU())
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.last(self.net(x)).squeeze(-1) * scale


class Views(Energy):
    """Returns two overlapping views of a tensor that is not returned, and a result of it."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        features = self.net(x)
        return {"left": features[:, :5], "right": features[:, 3:], "last": self.last(features)}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.second(torch.sin(self.first(x))) * y.square()).sum(-1)


def rows() -> torch.Tensor:
    return torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def dispatched(module: nn.Module, *samples: torch.Tensor) -> nn.Module:
    torch.manual_seed(0)
    return add_tvm_dispatch(module.double().train(), samples or (rows().requires_grad_(),))


def backwards(module: nn.Module) -> int:
    return sum(s.second_order_backwards for s in dispatch_report(module).specializations)


def compared(ours: nn.Module, step: Callable[[nn.Module], Any]) -> None:
    """Assert that ``step`` has the same result and gradients with ``ours`` and its own forward."""
    ours.zero_grad()
    theirs = eager(ours)
    torch.testing.assert_close(step(ours), step(theirs))
    for ours_now, theirs_now in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours_now.grad, theirs_now.grad)


def gradient_penalty(module: nn.Module) -> list[torch.Tensor]:
    x = rows().requires_grad_()
    energy = module(x)
    (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    loss = energy.mean() + (force.norm(dim=1) - 1).square().mean()
    loss.backward()
    assert x.grad is not None
    return [loss.detach(), x.grad]


def test_gradient_penalties_are_trained_on() -> None:
    ours = dispatched(Energy())
    compared(ours, gradient_penalty)
    assert (dispatch_report(ours).tvm_calls, backwards(ours)) == (1, 1)
    assert "for create_graph=True: 1" in str(dispatch_report(ours))


def test_third_derivatives() -> None:
    def step(module: nn.Module) -> list[torch.Tensor]:
        x = rows().requires_grad_()
        found = [module(x, scale=2.0)]
        for _ in range(3):
            (slope,) = torch.autograd.grad(found[-1].sum(), x, create_graph=True)
            found.append(slope)
        found[-1].square().sum().backward()
        return found

    ours = add_tvm_dispatch(
        Energy().double(), rows().requires_grad_(), sample_kwargs={"scale": 2.0}
    )
    compared(ours, step)
    assert (dispatch_report(ours).tvm_calls, backwards(ours)) == (1, 1)


def test_hessians() -> None:
    ours = dispatched(Energy())
    x = rows()

    def hessian(module: nn.Module) -> Any:
        return torch.autograd.functional.hessian(lambda v: module(v).square().sum(), x)

    torch.testing.assert_close(hessian(ours), hessian(eager(ours)))
    assert torch.autograd.gradgradcheck(ours, (rows().requires_grad_(),))


@pytest.mark.parametrize("used", [("left",), ("last", "right"), ("left", "right", "last")])
def test_outputs_that_are_views_and_those_that_nobody_uses(used: tuple[str, ...]) -> None:
    def step(module: nn.Module) -> list[torch.Tensor]:
        x = rows().requires_grad_()
        outputs = module(x)
        loss = torch.stack([outputs[name].pow(3).sum() for name in used]).sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        slope.pow(3).sum().backward()
        assert x.grad is not None
        return [slope, x.grad]

    ours = dispatched(Views())
    compared(ours, step)
    assert (dispatch_report(ours).tvm_calls, backwards(ours)) == (1, 1)


def test_one_tensor_for_two_arguments_and_tied_parameters() -> None:
    def step(module: nn.Module) -> list[torch.Tensor]:
        x = rows().requires_grad_()
        y = x.sin()
        (slope,) = torch.autograd.grad(module(y, y).sum(), x, create_graph=True)
        slope.pow(3).sum().backward()
        assert x.grad is not None
        return [slope, x.grad]

    ours = dispatched(Tied(), rows().requires_grad_(), rows().requires_grad_())
    compared(ours, step)
    assert (dispatch_report(ours).tvm_calls, backwards(ours)) == (1, 1)


def test_hooks_and_kept_gradients_of_arguments_see_each_gradient_once() -> None:
    def step(module: nn.Module) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        x = rows().requires_grad_()
        y = x.sin()
        y.retain_grad()
        y.register_hook(seen.append)
        (slope,) = torch.autograd.grad(module(y).sum(), x, create_graph=True)
        assert y.grad is not None
        return [slope, y.grad, *seen]

    ours = dispatched(Energy())
    compared(ours, step)
    assert backwards(ours) == 1


def test_dispatched_modules_within_the_module() -> None:
    inner = dispatched(Energy())
    outer = nn.Sequential(nn.Linear(3, 3), inner).double()
    compared(outer, gradient_penalty)
    assert backwards(inner) == 1
    whole = add_tvm_dispatch(outer, rows().requires_grad_())
    compared(whole, gradient_penalty)
    assert (backwards(whole), backwards(inner)) == (1, 2)


def test_checked_calls() -> None:
    ours = add_tvm_dispatch(Energy().double(), rows().requires_grad_(), options={"check": "always"})
    compared(ours, gradient_penalty)
    assert backwards(ours) == 1


class Drops(Energy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = nn.functional.dropout(self.net(x), 0.5, self.training) + torch.rand(5, 8)
        return self.last(nn.functional.dropout(x, 0.25, self.training)).squeeze(-1)


def test_the_same_numbers_are_drawn_again() -> None:
    def step(module: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(5)
        return [*gradient_penalty(module), torch.get_rng_state()]

    ours = dispatched(Drops())
    compared(ours, step)
    assert (dispatch_report(ours).tvm_calls, backwards(ours)) == (1, 1)


class Counts(Energy):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.count += 1
        return super().forward(x)


def test_writes_into_buffers_are_refused_by_name() -> None:
    ours = dispatched(Counts())
    x = rows().requires_grad_()
    (slope,) = torch.autograd.grad(ours(x).sum(), x, create_graph=True)
    for wanted in (x, ours.last.weight):
        with pytest.raises(
            BridgeError,
            match="because forward writes into buffers",
        ):
            torch.autograd.grad(slope.sum(), wanted, allow_unused=True, retain_graph=True)  # type: ignore[arg-type]


def write_parameter(module: nn.Module, x: torch.Tensor) -> None:
    bias = module.last.bias
    assert isinstance(bias, nn.Parameter)
    bias.data = bias.data + 1


def exchange_parameter(module: nn.Module, x: torch.Tensor) -> None:
    last = module.last
    assert isinstance(last, nn.Linear)
    last.bias = nn.Parameter(last.bias.detach() + 1)


def hook_parameter(module: nn.Module, x: torch.Tensor) -> None:
    bias = module.last.bias
    assert isinstance(bias, nn.Parameter)
    bias.register_hook(lambda gradient: gradient * 2)


def set_mode(module: nn.Module, x: torch.Tensor) -> None:
    module.eval()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (write_parameter, "was written since"),
        (exchange_parameter, "was exchanged since"),
        (hook_parameter, "has a hook"),
        (set_mode, "another mode"),
        (
            lambda module, x: setattr(module.net[1], "forward", torch.sin),
            "a submodule was replaced",
        ),
    ],
)
def test_what_is_otherwise_than_at_the_call(change: Any, reason: str) -> None:
    ours = dispatched(Energy())
    x = rows().requires_grad_()
    energy = ours(x).sum()
    change(ours, x)
    slopes = torch.autograd.grad(
        energy, (x, *ours.parameters()), create_graph=True, allow_unused=True
    )
    with pytest.raises(BridgeError, match=f"double backward.*({reason})"):
        slopes[0].sum().backward()
    assert backwards(ours) == 0


def test_removed_dispatch_and_copies() -> None:
    ours = dispatched(Energy())
    copied = copy.deepcopy(ours)
    compared(copied, gradient_penalty)
    assert (backwards(copied), backwards(ours)) == (1, 0)
