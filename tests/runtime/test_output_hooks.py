"""Hooks on outputs are called as in eager PyTorch, also if some outputs get no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from tests.dispatch_helpers import eager
from tvmbridge import add_tvm_dispatch


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


@pytest.fixture(scope="module")
def module() -> nn.Module:
    torch.manual_seed(0)
    return add_tvm_dispatch(Pair().double(), _x())


def _x() -> torch.Tensor:
    return torch.linspace(-1, 2, 6, dtype=torch.float64).reshape(2, 3).requires_grad_()


def _hooked(module: nn.Module) -> tuple[Any, ...]:
    x, seen = _x(), []
    left, right = module(x)
    right.register_hook(lambda g: seen.append(("right", g)))
    left.register_hook(lambda g: g * 2)
    left.register_hook(lambda g: seen.append(("left", g.sum().item())))
    left.register_hook(lambda g: seen.append("removed")).remove()
    right.retain_grad()
    left.sum().backward()
    return seen, right.grad, x.grad


def test_a_hook_waits_for_a_gradient(module: nn.Module) -> None:
    ours, theirs = _hooked(module), _hooked(eager(module))
    assert ours[:2] == theirs[:2] == ([("left", 12.0)], None)
    torch.testing.assert_close(ours[2], theirs[2])


def _of_several(module: nn.Module, mode: Any) -> list[Any]:
    x, seen = _x(), []
    left, right = module(x)
    other = x * 2
    register_multi_grad_hook((left, right, other), lambda g: seen.append(_shapes(g)), mode=mode)
    (left.sum() + other.sum()).backward()
    return seen


def _shapes(gradients: Any) -> Any:
    if gradients is None or isinstance(gradients, torch.Tensor):
        return None if gradients is None else gradients.shape
    return [_shapes(g) for g in gradients]


@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_of_several_tensors_is_called_once(module: nn.Module, mode: str) -> None:
    ours, theirs = _of_several(module, mode), _of_several(eager(module), mode)
    assert ours == theirs
    assert len(ours) == 1
