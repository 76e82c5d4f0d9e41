"""Side effects that a checkpoint repeats in backward, in eager PyTorch, are refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointError, checkpoint

from tests.thinned import thinned
from tvmbridge import (
    UnsupportedOperatorError,
    add_tvm_dispatch,
    dispatch_report,
    remove_tvm_dispatch,
)


class Checkpointed(nn.Module):
    """Batch norm inside a checkpoint."""

    def __init__(self, kind: str, *, reentrant: bool) -> None:
        super().__init__()
        self.kind, self.reentrant = kind, reentrant
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.part, self.linear(x), use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    def part(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "module":
            return functional.relu(self.norm(x))
        if self.kind == "function":
            norm = self.norm
            return functional.batch_norm(x, norm.running_mean, norm.running_var, training=True)
        hidden = torch.zeros_like(x)
        hidden[1:] = x[1:]
        return functional.relu(hidden, inplace=True)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["module", "function"])
def test_statistics_that_are_moved_twice_are_refused(kind: str, reentrant: bool) -> None:
    with pytest.raises(UnsupportedOperatorError, match="within a checkpoint, into a tensor that"):
        add_tvm_dispatch(Checkpointed(kind, reentrant=reentrant).train(), torch.randn(3, 4))


def test_what_is_made_within_may_be_written() -> None:
    module = add_tvm_dispatch(Checkpointed("own", reentrant=False).train(), torch.randn(3, 4))
    found = []
    for called in (module, Checkpointed("own", reentrant=False).train()):
        called.load_state_dict(module.state_dict())
        out = called(torch.arange(12.0).reshape(3, 4))
        found.append([out, *torch.autograd.grad(out.sum(), called.linear.parameters())])
    torch.testing.assert_close(*found)
    assert dispatch_report(module).tvm_calls == 1


class WithCache(nn.Module):
    """A module whose first call fills a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.cache: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None:
            self.cache = torch.arange(4.0).cos()
        return functional.relu(self.linear(x) * self.cache) * self.cache


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_call_is_repeated_by_what_served_it(reentrant: bool) -> None:
    module, x = WithCache(), torch.randn(3, 4, requires_grad=True)
    plain = copy.deepcopy(module)
    add_tvm_dispatch(module, x)
    for _ in range(3):
        found = []
        for called in (module, plain):
            called.zero_grad()
            checkpoint(called, x, use_reentrant=reentrant).sum().backward()
            found.append([p.grad for p in called.parameters()])
        torch.testing.assert_close(*found)
    report = dispatch_report(module)
    # A non-reentrant checkpoint stops a repeated call before the call is counted.
    assert report.tvm_calls == (5 if reentrant else 2)
    repeated = [reason for reason in report.fallbacks if "checkpoint repeats" in reason]
    assert len(repeated) == (not reentrant)


class Square(nn.Module):
    """Two layers for which eager PyTorch and compiled code save equal shapes in different order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", ["dispatched", "removed", "hooked", "unhooked"])
def test_what_another_way_saved_is_never_taken(way: str) -> None:
    """The module changes between forward and backward, so that the repeated call saves others.

    Backward must raise an error, and not take the saved tensors of the other way.
    """
    module, x = Square(), torch.randn(4, 4, requires_grad=True)
    if way != "dispatched":
        add_tvm_dispatch(module, x)
    if way == "unhooked":
        handle = module.first.register_forward_hook(lambda *called: None)
    loss = checkpoint(module, x, use_reentrant=False).square().sum()
    if way == "dispatched":
        add_tvm_dispatch(module, x)
    elif way == "removed":
        remove_tvm_dispatch(module)
    elif way == "hooked":
        module.first.register_forward_hook(lambda *called: None)
    else:
        handle.remove()
    with pytest.raises(CheckpointError, match=r"different metadata"):
        loss.backward()


class Tallied(nn.Module):
    """Counts its calls, and a checkpoint repeats the call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.steps, self.sizes = kind, 0, [0]
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        reentrant = self.kind == "read, reentrant"
        return checkpoint(self.part, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    def part(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "listed":
            self.sizes.append(len(x))
        elif self.kind == "filled":
            self.steps = max(self.steps, len(x))
        else:
            self.steps += 1
        y = self.linear(x)
        return y if self.kind == "counted" else torch.tanh(y) * self.steps


_KINDS = ["read", "read, reentrant", "counted", "listed", "filled"]


@pytest.mark.parametrize("kind", thinned(_KINDS, 2))
def test_attributes_that_a_checkpoint_changes_twice_are_as_in_eager_pytorch(kind: str) -> None:
    eager = Tallied(kind)
    served = add_tvm_dispatch(copy.deepcopy(eager), on_fallback="silent")
    for _ in range(3):
        x = torch.randn(3, 4, requires_grad=True)
        found = []
        for module in (served, eager):
            out = module(x)
            x.grad = None
            module.zero_grad()
            out.sum().backward()
            found.append([out, x.grad.clone(), *(p.grad.clone() for p in module.parameters())])
        torch.testing.assert_close(*found)
        assert (served.steps, served.sizes) == (eager.steps, eager.sizes)
    assert dispatch_report(served).tvm_calls == (2 if kind == "filled" else 0)
