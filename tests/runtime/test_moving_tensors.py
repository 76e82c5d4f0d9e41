"""Parameters that are at other addresses at each call, as those that FSDP gathers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.runtime.module_code import ModuleCode

_GENUINE = ModuleCode.serve


class Slow:
    """Counts the calls that no fast guard has accepted."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        patch.setattr(ModuleCode, "serve", lambda *a, **k: (self._count(), _GENUINE(*a, **k))[1])

    def _count(self) -> None:
        self.calls += 1


def made(training: bool) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double().train(training)
    ours, x = copy.deepcopy(eager), torch.randn(4, 6, dtype=torch.float64)
    with torch.set_grad_enabled(training):
        add_tvm_dispatch(ours, (x,), options={"only_if_faster": False})
    return ours, eager, x


def move(module: nn.Module, held: list[torch.Tensor]) -> None:
    """Move all parameters to new memory, and change their values; ``held`` keeps the old memory."""
    for parameter in module.parameters():
        held.append(parameter.data)
        parameter.data = parameter.data.clone() * 1.01


def same_step(ours: nn.Module, eager: nn.Module, x: torch.Tensor, training: bool) -> None:
    with torch.set_grad_enabled(training):
        results = [module(x) for module in (ours, eager)]
    torch.testing.assert_close(*results)
    if not training:
        return
    gradients = []
    for module, result in zip((ours, eager), results, strict=True):
        gradients.append(torch.autograd.grad(result.square().sum(), list(module.parameters())))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("training", [True, False])
def test_a_fast_guard_accepts_other_addresses(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, eager, x = made(training)
    slow, held = Slow(monkeypatch), list[torch.Tensor]()
    for number in range(8):
        move(ours, held)
        move(eager, held)
        same_step(ours, eager, x, training)
        assert slow.calls == min(number + 1, 2)
    # At rest, a guard that is bound to the addresses takes over.
    for _ in range(30):
        same_step(ours, eager, x, training)
    assert slow.calls == 3
    # After another move, it takes over only after a longer rest.
    move(ours, held)
    move(eager, held)
    for _ in range(30):
        same_step(ours, eager, x, training)
    assert slow.calls == 4
    assert not dispatch_report(ours).fallbacks


def test_other_kinds_of_tensors_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, eager, x = made(True)
    held = list[torch.Tensor]()
    for _ in range(4):
        move(ours, held)
        move(eager, held)
        same_step(ours, eager, x, True)
    slow = Slow(monkeypatch)
    for module in (ours, eager):
        module[0].weight.data = module[0].weight.data.t().contiguous().t()
    same_step(ours, eager, x, True)
    assert slow.calls == 1
    for module in (ours, eager):
        module[2].bias.requires_grad_(False)
        results = module(x)
        results.sum().backward()
    assert ours[2].bias.grad is None
    torch.testing.assert_close(ours[0].weight.grad, eager[0].weight.grad)


def test_a_write_before_backward_is_noticed() -> None:
    ours, _, x = made(True)
    held = list[torch.Tensor]()
    for _ in range(4):
        move(ours, held)
        result = ours(x)
    with torch.no_grad():
        ours[2].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
