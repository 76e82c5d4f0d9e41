"""Dispatched modules inside a dispatched module, in either order, and many in one model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import assert_same_step, eager, sample
from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch, dispatch_report, remove_tvm_dispatch


class Attention(nn.Module):
    """Attention with three products to combine, whose weights both dispatches want to pack."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.query(x) @ self.key(x).mT, -1) @ self.value(x)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(24, 24), nn.Dropout(0.2), Attention(), nn.Tanh())
    return layers.double().train()


@pytest.mark.slow
@pytest.mark.parametrize("order", thinned(["child first", "parent first"], 2))
def test_a_parent_keeps_its_code_whatever_becomes_of_the_child(order: str) -> None:
    model, reference = _model(), _model()
    child: nn.Module = model[2]
    both = (child, model) if order == "child first" else (model, child)
    for module in both:
        add_tvm_dispatch(module, sample().requires_grad_())
    assert_same_step(model, reference, sample())
    assert_same_step(child, reference[2], sample())
    duplicate = copy.deepcopy(model)
    assert_same_step(duplicate, reference, sample())
    assert dispatch_report(duplicate).tvm_calls == 1
    remove_tvm_dispatch(child)
    assert_same_step(model, reference, sample())
    report = dispatch_report(model)
    assert (report.tvm_calls, report.fallbacks) == (2, {})
    # If the parent has no code for a call, its own forward runs, which calls the child's code.
    add_tvm_dispatch(child, sample(7, 24).requires_grad_())
    assert_same_step(model, reference, sample(7, 24))
    assert dispatch_report(model).fallbacks == {"the shape of an input differs": 1}
    assert dispatch_report(child).tvm_calls == 1
    assert not dispatch_report(child).fallbacks


def test_a_child_s_own_forward_is_told_from_another() -> None:
    model = nn.Sequential(nn.Linear(24, 24).double().eval())
    child = model[0]
    add_tvm_dispatch(model.eval(), sample())
    for own, replaced in ((None, False), (lambda x: x * 2, True)):
        if own is not None:
            child.forward = own
        add_tvm_dispatch(child, sample())
        with torch.no_grad():
            torch.testing.assert_close(model(sample()), eager(child)(sample()))
        assert bool(dispatch_report(model).fallbacks) is replaced


@pytest.mark.slow
def test_twenty_modules_in_one_model() -> None:
    layers = [nn.Linear(24, 24), nn.ReLU(), nn.Tanh()]
    for layer in layers:
        add_tvm_dispatch(layer.double().eval(), sample())
    # Copies share the compiled code, but have a dispatch of their own.
    model = nn.Sequential(*(copy.deepcopy(layers[i % 3]) for i in range(20))).eval()
    reference = nn.Sequential(*map(eager, model))
    with torch.no_grad():
        torch.testing.assert_close(model(sample()), reference(sample()))
        assert [dispatch_report(layer).tvm_calls for layer in model] == [1] * 20
        add_tvm_dispatch(model, sample())
        torch.testing.assert_close(model(sample()), reference(sample()))
    assert dispatch_report(model).tvm_calls == 1
    assert not dispatch_report(model).fallbacks


def test_what_learns_is_compiled_for_in_each_of_them() -> None:
    parts = (nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(3))
    plain = nn.Sequential(*parts).double().train()
    module = copy.deepcopy(plain)
    for each in (module[0], module[2], module):
        add_tvm_dispatch(each, sample())
    for learns in (False, True, False):
        for each in (module, plain):
            each[0].requires_grad_(learns)
        assert_same_step(module, plain, sample())
        # A shape that the inner block has code for, but the whole module has not.
        add_tvm_dispatch(module[2], sample(7, 24))
        assert_same_step(module, plain, sample(7, 24))
    assert dispatch_report(module).fallbacks == {"the shape of an input differs": 3}
    assert dispatch_report(module).tvm_calls == 3
    assert dispatch_report(module[2]).tvm_calls == 3
    assert dispatch_report(module[2]).fallbacks == {}
