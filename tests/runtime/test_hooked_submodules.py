"""Hooks of submodules that no graph calls: calls run in parts, between which the hooks run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from tvmbridge import add_tvm_dispatch, dispatch_report

_BEFORE_PARTS = 2  # calls with hooks that the module's own forward serves


class _Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 1)
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(functional.silu(self.first(x) * 2 + 1))
        return self.head(self.norm(functional.gelu(features).mean((2, 3)))).tanh() * 2 + 1


class _Kept:
    """What hooks have seen: features and their gradients, as Grad-CAM keeps them."""

    def __init__(self) -> None:
        self.seen: dict[str, Tensor] = {}

    def features(self, name: str, module: nn.Module, given: Any, made: Tensor) -> None:
        self.seen[name] = made.detach().clone()

    def gradient(self, module: nn.Module, given: Any, made: Any) -> None:
        self.seen["gradient"] = made[0].clone()

    def scaled(self, module: nn.Module, given: Any, made: Any) -> Any:
        return tuple(None if g is None else g * 2 for g in given)

    def tripled(self, module: nn.Module, made: Any) -> Any:
        return tuple(g * 3 for g in made)


def _backward(model: _Features, kept: _Kept) -> list[RemovableHandle]:
    return [model.body.register_full_backward_hook(kept.gradient)]


def _bound_methods(model: _Features, kept: _Kept) -> list[RemovableHandle]:
    keep = functools.partial(kept.features, "body")
    return [model.body.register_forward_hook(keep)]


def _that_change_gradients(model: _Features, kept: _Kept) -> list[RemovableHandle]:
    return [
        model.norm.register_full_backward_hook(kept.scaled),
        model.head.register_full_backward_pre_hook(kept.tripled),
        *_bound_methods(model, kept),
    ]


def _steps(model: _Features, kept: _Kept, count: int) -> list[Tensor]:
    results = []
    for _ in range(count):
        model.zero_grad()
        y = model(torch.randn(2, 3, 9, 9, dtype=torch.float64))
        y.square().sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results += [y.detach(), *gradients, *kept.seen.values()]
    return results


def _run(
    hooks: Callable[..., list[RemovableHandle]], served_before: int, dispatched: bool
) -> tuple[list[Tensor], list[Any]]:
    """Return the results of calls before, with and without hooks, and a report of each phase."""
    torch.manual_seed(0)
    model, kept = _Features().double(), _Kept()
    if dispatched:
        add_tvm_dispatch(model)
    results, reports = _steps(model, kept, served_before), []
    handles = hooks(model, kept)
    results += _steps(model, kept, 5)
    reports += [dispatch_report(model)] if dispatched else []
    for handle in handles:
        handle.remove()
    kept.seen.clear()
    results += _steps(model, kept, 3)
    reports += [dispatch_report(model)] if dispatched else []
    return results, reports


@pytest.mark.parametrize(
    ("hooks", "before"), [(_backward, 0), (_bound_methods, 2), (_that_change_gradients, 2)]
)
def test_hooks_run_between_parts(hooks: Callable[..., Any], before: int) -> None:
    expected, _ = _run(hooks, before, False)
    found, (hooked, unhooked) = _run(hooks, before, True)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
    assert hooked.fallbacks == {"a submodule has hooks": _BEFORE_PARTS}
    assert hooked.tvm_calls == before + 5 - _BEFORE_PARTS
    assert hooked.cut == "a submodule has hooks"
    assert hooked.parts
    # Without hooks one graph serves again.
    assert unhooked.tvm_calls == hooked.tvm_calls + 3
    assert unhooked.cut is None
    assert [p.calls for p in unhooked.parts] == [p.calls for p in hooked.parts]


def test_calls_between_those_with_hooks_are_served_whole() -> None:
    torch.manual_seed(0)
    model, kept = _Features().double(), _Kept()
    add_tvm_dispatch(model)
    counts = []
    for _ in range(4):
        (handle,) = _backward(model, kept)
        _steps(model, kept, 1)
        handle.remove()
        _steps(model, kept, 1)
        report = dispatch_report(model)
        counts.append((report.tvm_calls, len(report.parts), report.cut))
    assert report.fallbacks == {"a submodule has hooks": _BEFORE_PARTS}
    assert counts == [(1, 0, None), (2, 0, None), (4, 2, None), (6, 2, None)]


def test_hooks_around_each_operator_leave_no_part() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    for child in model:
        child.register_full_backward_hook(lambda *_: None)
    add_tvm_dispatch(model)
    x = torch.randn(2, 4)
    for _ in range(14):
        model(x).sum().backward()
    report = dispatch_report(model)
    assert report.tvm_calls == 0
    assert sum(report.fallbacks.values()) == 14
    assert any("no part of it is large enough" in reason for reason in report.fallbacks)
