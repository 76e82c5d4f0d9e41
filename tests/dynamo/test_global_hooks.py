"""Hooks of all modules, added after torch.compile, act as if they had been there before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks

from tests.thinned import thinned


def _doubled(module: nn.Module, args: tuple[torch.Tensor]) -> Any:
    return (args[0] * 2,)


def _scaled(grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    return tuple(grad if grad is None else grad * 2 for grad in grads)


KINDS: dict[str, Callable[[], Any]] = {
    "forward": lambda: hooks.register_module_forward_hook(lambda m, given, result: result + 1),
    "before forward": lambda: hooks.register_module_forward_pre_hook(_doubled),
    "backward": lambda: hooks.register_module_full_backward_hook(lambda m, ins, out: _scaled(ins)),
    "before backward": lambda: hooks.register_module_full_backward_pre_hook(
        lambda m, out: _scaled(out)
    ),
}


def _steps(backend: str | None, kind: str) -> list[torch.Tensor]:
    """Return results and gradients of a call without the hook, two with it, and one without it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def call(x: torch.Tensor) -> torch.Tensor:
        return model(x) * 1.0

    called = call if backend is None else torch.compile(call, backend=backend)
    x = torch.randn(2, 4, requires_grad=True)
    found: list[torch.Tensor] = []

    def step() -> None:
        result = called(x)
        found.extend((result.detach(), *torch.autograd.grad(result.sum(), [x])))

    step()
    handle = KINDS[kind]()
    try:
        step()
        step()
    finally:
        handle.remove()
    step()
    return found


@pytest.mark.parametrize("kind", thinned(KINDS, 2))
def test_hooks_added_and_removed(kind: str) -> None:
    torch.testing.assert_close(_steps("tvmbridge", kind), _steps(None, kind))


def test_a_hook_is_not_called_for_the_modules_of_the_backend() -> None:
    seen: set[str] = set()
    handle = nn.modules.module.register_module_forward_pre_hook(
        lambda module, _: seen.add(type(module).__name__)
    )
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    try:
        model.compile(backend="tvmbridge")
        found = model(x)
    finally:
        handle.remove()
    linear = model[0]
    torch.testing.assert_close(found, nn.functional.linear(x, linear.weight, linear.bias))
    assert seen == {"Sequential", "Linear"}
