"""Double backward: gradient penalties, forces, Hessians."""

from __future__ import annotations

import copy
import functools
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


@functools.cache
def compiled(kind: type[nn.Module], inputs: int) -> nn.Module:
    torch.manual_seed(0)
    samples = tuple(rows().requires_grad_() for _ in range(inputs))
    return add_tvm_dispatch(kind().double().train(), samples)


def dispatched(kind: type[nn.Module], inputs: int = 1) -> nn.Module:
    """Return a module of ``kind`` with a dispatch of its own; copies share the compiled code."""
    return copy.deepcopy(compiled(kind, inputs))


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
    ours = dispatched(Energy)
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
    ours = dispatched(Energy)
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

    ours = dispatched(Views)
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

    ours = dispatched(Tied, 2)
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

    ours = dispatched(Energy)
    compared(ours, step)
    assert backwards(ours) == 1


def test_dispatched_modules_within_the_module() -> None:
    inner = dispatched(Energy)
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

    ours = dispatched(Drops)
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


class Stateful(Energy):
    """Rebinds a buffer that its results depend on, counts, and leaves features in an attribute."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.features = self.net(x)
        self.step += 1
        self.mean = 0.9 * self.mean + 0.1 * self.features.detach().mean(0)
        return self.last(self.features * (1 + self.mean)) / (1 + 0.1 * self.step)


class Recurrent(nn.Module):
    """Reads the state that the call before has left in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRUCell(3, 8), nn.Linear(8, 1)
        self.hidden = torch.zeros(5, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.cell(x, self.hidden.detach())
        return self.last(self.hidden)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def spectral() -> nn.Module:
    norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Linear(3, 8)), nn.Tanh(), norm(nn.Linear(8, 1)))


def two_calls(module: nn.Module) -> list[Any]:
    """Differentiate a gradient after another call has written the module's state."""
    x = rows().requires_grad_()
    first, second = module(x), module(rows() + 1)
    (force,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    (first.mean() - second.mean() + (force.norm(dim=1) - 1).square().mean()).backward()
    state = [b.clone() for b in module.buffers()]
    left = [vars(module).get(name) for name in ("step", "features", "hidden")]
    return [x.grad, *state, *(v.detach() if torch.is_tensor(v) else v for v in left)]


@pytest.mark.parametrize(
    "make",
    [
        normed,
        *(pytest.param(m, marks=pytest.mark.slow) for m in (Stateful, spectral, Counts, Recurrent)),
    ],
)
def test_modules_that_write_their_state(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    ours = make().double().train()
    theirs = copy.deepcopy(ours)
    add_tvm_dispatch(ours)
    for _ in range(2):
        torch.testing.assert_close(two_calls(ours), two_calls(theirs))
    for ours_now, theirs_now in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours_now.grad, theirs_now.grad)
    assert backwards(ours) == 2
    assert not dispatch_report(ours).fallbacks


def test_large_buffers_that_results_depend_on_are_refused_by_name() -> None:
    class Large(Energy):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(2**18))

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            y = super().forward(x) * self.table.clone().mean()
            self.table.mul_(0.5)
            return y

    ours, x = dispatched(Large), rows().requires_grad_()
    (slope,) = torch.autograd.grad(ours(x).sum(), x, create_graph=True)
    with pytest.raises(BridgeError, match="buffers of more than a megabyte"):
        slope.sum().backward()


def exchange(module: nn.Module) -> None:
    last = module.last
    assert isinstance(last, nn.Linear)
    last.bias = nn.Parameter(last.bias.detach() + 1)


def swap(module: nn.Module) -> None:
    net = module.net
    assert isinstance(net, nn.Sequential)
    net[0].bias, net[2].bias = net[2].bias, net[0].bias


@pytest.mark.parametrize("change", [exchange, swap])
def test_parameters_exchanged_since_the_call(change: Callable[[nn.Module], None]) -> None:
    def step(module: nn.Module) -> list[torch.Tensor]:
        x, own = rows().requires_grad_(), list(module.parameters())
        energy = module(x).sum()
        change(module)
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return [slope, *torch.autograd.grad(slope.square().sum(), own[:-1])]

    ours = dispatched(Energy)
    compared(ours, step)
    assert backwards(ours) == 1


def test_parameters_that_became_one_are_refused_by_name() -> None:
    ours, x = dispatched(Energy), rows().requires_grad_()
    energy = ours(x).sum()
    ours.net[2].bias = ours.net[0].bias  # type: ignore[index, union-attr]
    (slope,) = torch.autograd.grad(energy, x, create_graph=True)
    with pytest.raises(BridgeError, match="was exchanged since"):
        slope.sum().backward()


@pytest.mark.parametrize("kind", [Energy, Tied])
def test_steps_of_meta_learning_through_functional_call(kind: type[nn.Module]) -> None:
    def step(module: nn.Module) -> torch.Tensor:
        fast: dict[str, Any] = dict(module.named_parameters())
        given = (rows(), rows()) if kind is Tied else (rows(),)
        for _ in range(2):
            loss = torch.func.functional_call(module, fast, given).square().mean()
            slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {n: p - s for (n, p), s in zip(fast.items(), slopes, strict=True)}
        loss = torch.func.functional_call(module, fast, given).square().mean()
        loss.backward()
        return loss.detach()

    ours = dispatched(kind, 2 if kind is Tied else 1)
    compared(ours, step)
    assert backwards(ours)


def write_parameter(module: nn.Module, x: torch.Tensor) -> None:
    bias = module.last.bias
    assert isinstance(bias, nn.Parameter)
    bias.data = bias.data + 1


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
        (hook_parameter, "has a hook"),
        (set_mode, "another mode"),
        (
            lambda module, x: setattr(module.net[1], "forward", torch.sin),
            "a submodule was replaced",
        ),
    ],
)
def test_what_is_otherwise_than_at_the_call(change: Any, reason: str) -> None:
    ours = dispatched(Energy)
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
    ours = dispatched(Energy)
    copied = copy.deepcopy(ours)
    compared(copied, gradient_penalty)
    assert (backwards(copied), backwards(ours)) == (1, 0)
