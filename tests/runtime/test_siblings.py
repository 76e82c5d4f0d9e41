"""Hooks are refused on an output that other outputs depend on, if they would miss a gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import eager
from tvmbridge import BridgeError, add_tvm_dispatch


class Features(nn.Module):
    """Returns features, logits computed from them, and two outputs without a gradient to them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features = torch.tanh(self.body(x))
        logits = self.head(features)
        picked = torch.ones_like(x)[features.argmax(-1)] * x  # no gradient flows to features
        return features, logits, picked, features.argmax(-1)


def _x() -> torch.Tensor:
    return torch.linspace(-1, 2, 24, dtype=torch.float64).reshape(4, 6).requires_grad_()


@pytest.fixture(scope="module")
def module() -> nn.Module:
    torch.manual_seed(0)
    return add_tvm_dispatch(Features().double().train(), _x())


def _gradients(module: nn.Module, hooked: int, *read: int) -> list[Any]:
    """Run backward from the outputs ``read``; return gradients of one output and the parameters."""
    outputs = module(_x())
    outputs[hooked].retain_grad()
    module.zero_grad()
    sum(outputs[n].square().sum() for n in read).backward()  # type: ignore[union-attr]
    return [outputs[hooked].grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize(("hooked", "read"), [(0, (0,)), (1, (0, 1)), (2, (0, 2)), (0, (2,))])
def test_gradients_of_outputs_that_no_read_one_is_computed_from(
    module: nn.Module, hooked: int, read: tuple[int, ...]
) -> None:
    ours, theirs = (_gradients(m, hooked, *read) for m in (module, eager(module)))
    assert [g is None for g in ours] == [g is None for g in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one is None or torch.allclose(one, other, rtol=1e-12)


@pytest.mark.parametrize("read", [(1,), (0, 1)])
def test_a_gradient_that_would_be_missed_is_refused(
    module: nn.Module, read: tuple[int, ...]
) -> None:
    with pytest.raises(BridgeError, match=r"output 0 .* has a hook or retain_grad"):
        _gradients(module, 0, *read)


def test_a_hook_is_refused_until_it_is_removed(module: nn.Module) -> None:
    features, logits, *_ = module(_x())
    seen: list[Any] = []
    handle = features.register_hook(seen.append)
    with pytest.raises(BridgeError, match="Dispatch the submodules"):
        logits.sum().backward(retain_graph=True)
    handle.remove()
    logits.sum().backward()
    assert not seen


def test_a_gradient_by_an_output_that_others_are_computed_from_is_refused(
    module: nn.Module,
) -> None:
    features, logits, picked, _ = module(_x())
    both = logits.sum() + features.sum()
    for asked in (features, torch.autograd.graph.get_gradient_edge(features)):
        for inputs in ([asked], [asked, module.get_parameter("body.weight")]):
            for loss in (logits.sum(), both):
                with pytest.raises(BridgeError, match="is asked for by output 0 of a dispatched"):
                    torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
    # Gradients that do not flow from one output to another are as in eager PyTorch.
    found = torch.autograd.grad(both + (picked * 3).sum(), [logits, picked], retain_graph=True)
    assert [float(g.mean()) for g in found] == [1.0, 3.0]
    (alone,) = torch.autograd.grad((features * 2).sum(), features, retain_graph=True)
    assert bool((alone == 2).all())
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(picked.sum(), features, retain_graph=True)
    weight = module.get_parameter("head.weight")
    assert torch.autograd.grad(both, weight, retain_graph=True)[0].isfinite().all()
    with pytest.raises(BridgeError, match="is asked for by output 0"):
        both.backward(inputs=[features], retain_graph=True)


def test_submodules_that_are_dispatched_hand_it_over(module: nn.Module) -> None:
    parts = copy.deepcopy(eager(module))
    add_tvm_dispatch(parts.body, _x())
    add_tvm_dispatch(parts.head, _x())
    ours, theirs = (_gradients(m, 0, 0, 1) for m in (parts, eager(module)))
    torch.testing.assert_close(ours, theirs)
