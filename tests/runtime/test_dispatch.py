"""add_tvm_dispatch: served calls, fallbacks with reasons, and the module's unchanged properties."""

from __future__ import annotations

import copy
import pickle
import pickletools
from typing import Any

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import Block, assert_same_step, eager, make_block, sample, train_step
from tvmbridge import add_tvm_dispatch, dispatch_report, remove_tvm_dispatch


@pytest.fixture(scope="module")
def served() -> nn.Module:
    return add_tvm_dispatch(make_block().eval(), sample())


def test_inference_is_served_and_right(served: nn.Module) -> None:
    x = sample()
    before = dispatch_report(served).tvm_calls
    with torch.no_grad():
        torch.testing.assert_close(served(x), eager(served)(x), rtol=1e-12, atol=1e-12)
    assert dispatch_report(served).tvm_calls == before + 1


def test_training_step_equals_eager_from_the_same_seed(trained: nn.Module) -> None:
    before = dispatch_report(trained).tvm_calls
    assert_same_step(trained, eager(trained), sample())
    report = dispatch_report(trained)
    assert report.tvm_calls == before + 1
    assert not report.fallbacks
    assert "train with gradients" in str(report)


def test_train_mode_without_gradients_draws_dropout(trained: nn.Module) -> None:
    x = sample()
    with torch.no_grad():
        torch.manual_seed(5)
        ours = trained(x)
        state = torch.get_rng_state()
        torch.manual_seed(5)
        theirs = eager(trained)(x)
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(state, torch.get_rng_state())
    assert not ours.requires_grad


def test_optimizer_steps_are_seen() -> None:
    module = add_tvm_dispatch(make_block().train(), sample().requires_grad_())
    reference = eager(module)
    # SGD, since Adam divides by the root of tiny second moments, which magnifies rounding errors.
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9) for m in (module, reference)
    ]
    for step in range(4):
        for each, optimizer in zip((module, reference), optimizers, strict=True):
            train_step(each, sample(), seed=step)
            optimizer.step()
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert dispatch_report(module).tvm_calls == 4


class Adapted(nn.Module):
    """A linear layer and a low-rank adapter, whose results are added."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, dtype=torch.float64)
        self.up = nn.Linear(2, base.out_features, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def test_adapters_in_a_frozen_module_get_their_gradients() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).double().train()
    module = add_tvm_dispatch(copy.deepcopy(plain), x := torch.randn(2, 3, dtype=torch.float64))
    for each in (plain, module):
        each(x).sum().backward()
        each.requires_grad_(False)
        torch.manual_seed(1)
        each[0] = Adapted(each[0])
        each(x).sum().backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, msg=name)
    module.requires_grad_(False)
    assert not module(x).requires_grad
    module[0].up.requires_grad_()
    assert module(x).requires_grad


def test_tied_weights_get_the_sum_of_their_gradients() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.second = nn.Linear(8, 8)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(x)))

    module = add_tvm_dispatch(Tied().double().train(), sample(3, 8).requires_grad_())
    assert_same_step(module, eager(module), sample(3, 8))
    assert dispatch_report(module).tvm_calls == 1
    module.second.weight = nn.Parameter(module.second.weight.detach() * 2)  # type: ignore[operator, union-attr]
    assert_same_step(module, eager(module), sample(3, 8))
    assert dispatch_report(module).fallbacks == {"tied parameters were untied": 1}


def test_removal_leaves_the_module_as_it_was() -> None:
    module = make_block()
    before, state = set(module.__dict__), repr(module)
    add_tvm_dispatch(module, sample())
    assert repr(module) == state
    remove_tvm_dispatch(module)
    assert set(module.__dict__) == before
    assert "forward" not in module.__dict__
    with pytest.raises(ValueError, match="not dispatched"):
        dispatch_report(module)


def test_an_instance_own_forward_is_given_back() -> None:
    module = make_block().eval()
    own = lambda x: Block.forward(module, x) * 2  # noqa: E731
    module.forward = own
    add_tvm_dispatch(module, sample())
    with torch.no_grad():
        torch.testing.assert_close(module(sample()), own(sample()))
    assert dispatch_report(module).tvm_calls == 1
    remove_tvm_dispatch(module)
    assert module.forward is own


def test_a_deep_copy_has_its_own_dispatch_and_parameters(trained: nn.Module) -> None:
    duplicate = copy.deepcopy(trained)
    assert dispatch_report(duplicate).tvm_calls == 0
    with torch.no_grad():
        duplicate.inner.weight.zero_()  # type: ignore[union-attr, operator]
    assert_same_step(duplicate, eager(duplicate), sample())
    assert_same_step(trained, eager(trained), sample())
    assert dispatch_report(duplicate).tvm_calls == 1


def test_an_unpickled_module_runs_its_own_forward(trained: nn.Module) -> None:
    loaded = pickle.loads(pickle.dumps(trained))
    assert loaded.state_dict().keys() == trained.state_dict().keys()
    assert_same_step(loaded, eager(trained), sample())
    with pytest.raises(ValueError, match="not dispatched"):
        dispatch_report(loaded)
    add_tvm_dispatch(loaded, sample().requires_grad_())
    assert_same_step(loaded, eager(trained), sample())
    assert dispatch_report(loaded).tvm_calls == 1


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@pytest.mark.parametrize("kind", ["class", "instance", "outer", "method"])
def test_a_pickle_of_a_dispatched_module_does_not_need_tvmbridge(
    trained: nn.Module, kind: str
) -> None:
    pickled: Any = trained
    if kind == "instance":
        pickled = nn.Linear(3, 3)
        pickled.forward = _scaled
        add_tvm_dispatch(pickled)
    elif kind == "outer":
        pickled = nn.Sequential(trained, nn.Dropout(0.5))
    elif kind == "method":
        pickled = trained.forward
    content = pickle.dumps(pickled)
    words = [argument for _, argument, _ in pickletools.genops(content)]
    assert not [w for w in words if isinstance(w, str) and w.startswith("tvmbridge")]
    loaded = pickle.loads(content)
    if kind == "instance":
        assert loaded.forward is _scaled
        return
    module = loaded.__self__ if kind == "method" else loaded
    module.eval()
    torch.testing.assert_close(loaded(sample()), eager(trained).eval()(sample()))
