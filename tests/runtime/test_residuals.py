"""Residuals between forward and backward: when they are freed, and which hooks get them."""

from __future__ import annotations

import copy
import sys
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tvmbridge import BridgeError, add_tvm_dispatch, dispatch_report


class Two(nn.Module):
    """A module with two outputs, of which backward often uses only the first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6, dtype=torch.float64)
        self.outer = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.inner(x)) * x
        return hidden, self.outer(hidden.sigmoid())


def pair() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """Return a dispatched module that is on its fast path, its eager copy, and an input."""
    torch.manual_seed(0)
    eager = Two().train()
    ours, x = copy.deepcopy(eager), torch.randn(4, 6, dtype=torch.float64)
    add_tvm_dispatch(ours, x)
    for _ in range(2):
        sum(o.sum() for o in ours(x)).backward()
    ours.zero_grad()
    return ours, eager, x


def step_of(output: torch.Tensor) -> Any:
    return output.grad_fn.step  # type: ignore[union-attr]


def assert_same_gradients(ours: nn.Module, eager: nn.Module) -> None:
    for one, other in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert not dispatch_report(ours).fallbacks
    ours.zero_grad()
    eager.zero_grad()


def loss_of(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    first, second = module(x)
    return first.square().sum() + second.sin().sum()


def test_backward_twice_is_an_error_of_pytorch_and_frees_residuals() -> None:
    ours, _, x = pair()
    first, second = ours(x)
    step = step_of(first)
    assert step.held is not None
    residuals = step.residuals
    assert len(residuals) > 0
    loss = first.sum() + second.sum()
    loss.backward()
    assert step.residuals is None
    assert sys.getrefcount(residuals) == 2
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_graph_that_is_kept_serves_again() -> None:
    ours, eager, x = pair()
    for module in (ours, eager):
        loss = loss_of(module, x)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(ours, eager)


def test_a_recorded_backward_frees_them_too() -> None:
    ours, eager, x = pair()
    for module in (ours, eager):
        given = x.clone().requires_grad_()
        loss = loss_of(module, given)
        (gradient,) = torch.autograd.grad(loss, given, create_graph=True)
        gradient.square().sum().backward()
    assert_same_gradients(ours, eager)


def test_hooks_on_saved_tensors_get_them() -> None:
    ours, eager, x = pair()
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> Any:
        packed.append(tensor.shape)
        # Keep the values unaligned and in another dtype.
        values = torch.cat([tensor.new_zeros(1), tensor.flatten()]).float()
        return values, tensor.shape, tensor.dtype

    def unpack(held: Any) -> torch.Tensor:
        values, shape, dtype = held
        return values.to(dtype)[1:].view(shape)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = loss_of(ours, x)
    step = step_of(ours(x)[0])
    assert len(packed) > len(step.residuals)
    loss.backward()
    loss_of(eager, x).backward()
    for one, other in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-5)


def test_checkpoints_and_calls_without_them_in_turn() -> None:
    ours, eager, x = pair()
    for module in (ours, eager):
        for use_reentrant in (False, True, False):
            given = x.clone().requires_grad_()
            first, second = checkpoint(module, given, use_reentrant=use_reentrant)  # type: ignore[misc]
            (first.sum() + second.square().sum()).backward()
            loss_of(module, x).backward()
    assert_same_gradients(ours, eager)


def test_parameters_exchanged_between_forward_and_backward() -> None:
    ours, eager, x = pair()
    for module in (ours, eager):
        loss = loss_of(module, x)
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
        loss.backward()
        loss_of(module, x).backward()
    assert_same_gradients(ours, eager)


def test_an_output_absent_again_and_again_gets_a_backward_of_its_own() -> None:
    ours, eager, x = pair()
    entry = ours.forward.code.kept.known[0].compiled()[0][1]  # type: ignore[union-attr]
    partial = entry.compiled.partial_backwards
    counts = []
    for number in range(5):
        for module in (ours, eager):
            first, second = module(x)
            (first if number != 3 else second).sum().backward()
        counts.append(partial.compiled)
        assert_same_gradients(ours, eager)
    assert counts == [0, 0, 1, 1, 1]


def test_what_cannot_be_compiled_for_speed_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise BridgeError("no compiler")

    ours, eager, x = pair()
    entry = ours.forward.code.kept.known[0].compiled()[0][1]  # type: ignore[union-attr]
    monkeypatch.setattr(entry.compiled.partial_backwards._loader, "_build", fails)
    for _ in range(5):
        for module in (ours, eager):
            module(x)[0].sum().backward()
        assert_same_gradients(ours, eager)
    assert entry.compiled.partial_backwards.compiled == 0


class Deep(nn.Module):
    """Eight layers whose results backward reads: 80 MB for 40,000 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean(), x[:2].sum(1)


@pytest.mark.slow
def test_no_residuals_are_left_in_memory_after_a_backward_of_its_own() -> None:
    module, x, sizes = Deep(), torch.randn(40_000, 64), []
    add_tvm_dispatch(module, x, options={"only_if_faster": False})
    for _ in range(6):
        module(x)[0].backward()
        sizes.append(psutil.Process().memory_info().rss / 2**20)
    assert sizes[-1] - sizes[1] < 30
