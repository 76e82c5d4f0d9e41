"""Tensors that forward creates and makes require a gradient."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.core.errors import BridgeError, CaptureError


class Starting(nn.Module):
    """Two layers and a buffer, from which ``act`` computes the results."""

    def __init__(self, act: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(3, 3), nn.Linear(3, 3), act
        self.register_buffer("grid", torch.linspace(0, 1, 6).reshape(2, 3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.act(self, x)


def _view(module: Any, x: torch.Tensor) -> Any:
    rows = x[:, None]  # speech models do this for checkpoints
    if not rows.requires_grad:
        rows.requires_grad = True
    return module.second(rows).exp()


def _copy(module: Any, x: torch.Tensor) -> Any:
    return module.first(module.grid.clone().detach().requires_grad_()) * x


def _new(module: Any, x: torch.Tensor) -> Any:
    zeros = torch.zeros(2, 3, dtype=x.dtype).requires_grad_()
    return module.second(zeros + x), zeros * 2


def _leaf(module: Any, x: torch.Tensor) -> Any:
    return module.second(x) * torch.ones(3, dtype=x.dtype, requires_grad=True)


def _detached(module: Any, x: torch.Tensor) -> Any:
    hidden = module.first(x)
    return module.second(hidden.detach().requires_grad_()).exp() + hidden


def _detached_argument(module: Any, x: torch.Tensor) -> Any:
    return module.first(x.detach().requires_grad_()) * x


def _unrecorded(module: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        hidden = module.first(x).exp_().requires_grad_()
    return module.second(hidden) + module.first(x)


def _steps(module: nn.Module, x: torch.Tensor) -> list[Any]:
    """Run one step; return the results, whether each requires a gradient, and all gradients."""
    x = x.detach().clone().requires_grad_(x.requires_grad)
    results = module(x)
    results = results if isinstance(results, tuple) else (results,)
    torch.cat([r.flatten() for r in results]).square().sum().backward()
    grads = [p.grad for p in (x, *module.parameters())]
    return [*(r.detach() for r in results), *(r.requires_grad for r in results), *grads]


_ACTS = (_view, _copy, _new, _leaf, _detached, _detached_argument, _unrecorded)


# By turns the argument is differentiable in quick tests, and is not.
@pytest.mark.parametrize(
    ("act", "differentiable"), thinned(itertools.product(_ACTS, (True, False)), 3)
)
def test_gradients_are_those_of_eager(act: Callable[..., Any], differentiable: bool) -> None:
    module = Starting(act).double().train()
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=differentiable)
    ours = add_tvm_dispatch(copy.deepcopy(module), x)
    torch.testing.assert_close(_steps(ours, x), _steps(module, x), rtol=1e-12, atol=1e-14)
    assert dispatch_report(ours).fallbacks == {}


@pytest.mark.parametrize("act", [_view, _copy, _new, _leaf, _detached, _unrecorded])
def test_where_nothing_else_learns_results_require_a_gradient_too(act: Callable[..., Any]) -> None:
    module = Starting(act).double().requires_grad_(False)
    x = torch.randn(2, 3, dtype=torch.float64)
    ours = add_tvm_dispatch(copy.deepcopy(module), x)
    torch.testing.assert_close(_steps(ours, x), _steps(module, x), rtol=1e-12, atol=1e-14)
    (reason,) = dispatch_report(ours).fallbacks
    assert "forward makes a tensor require a gradient" in reason
    with torch.no_grad():
        torch.testing.assert_close(ours(x), module(x), rtol=1e-12, atol=1e-14)
    assert dispatch_report(ours).tvm_calls == 1


def _returning(module: Any, x: torch.Tensor) -> Any:
    rows = x[:, None]
    return module.first(rows.requires_grad_()), rows


def _keeping(module: Any, x: torch.Tensor) -> Any:
    module.grid = module.grid.clone().requires_grad_()
    return module.first(x)


@pytest.mark.parametrize("act", [_returning, _keeping])
@pytest.mark.parametrize("recording", [False, True])
def test_a_tensor_that_remains_is_refused(act: Callable[..., Any], recording: bool) -> None:
    with (
        torch.set_grad_enabled(recording),
        pytest.raises(CaptureError, match="changes requires_grad of a tensor"),
    ):
        add_tvm_dispatch(Starting(act).train(), torch.randn(2, 3))


def test_a_leaf_is_not_returned() -> None:
    def act(module: Any, x: torch.Tensor) -> Any:
        leaf = torch.ones(3, requires_grad=True)
        return module.first(x) + leaf, leaf

    with pytest.raises(BridgeError, match="requires a gradient of its own"):
        add_tvm_dispatch(Starting(act).train(), torch.randn(2, 3))
