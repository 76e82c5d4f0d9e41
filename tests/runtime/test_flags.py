"""Each choice of tensors that require a gradient gets code of its own at the first such call."""

from __future__ import annotations

import copy
import itertools
import logging
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import eager, sample
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.runtime import entry_compiler as compiler

DROPPED = "code for this requires_grad of inputs and parameters was dropped"


class Joined(nn.Module):
    """Two inputs, a weight under two names, and a parameter that is also read under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            shift = (y * self.scale).mean()
        return torch.tanh(self.first(x)) * self.second(y) + shift * self.scale


def _inputs(*learn: bool) -> list[torch.Tensor]:
    return [sample(3, 4).add(i).requires_grad_(g) for i, g in enumerate(learn)]


def _assert_same(ours: nn.Module, plain: nn.Module, *learn: bool, leaf: bool = True) -> None:
    """Assert that outputs and gradients equal those of ``plain``; the same gradients are None."""
    results = []
    for module in (ours, plain):
        module.zero_grad()
        inputs = _inputs(*learn)
        given = inputs if leaf else [x * 1 for x in inputs]
        output = module(*given)
        if output.requires_grad:
            output.square().sum().backward()
        found = {name: p.grad for name, p in module.named_parameters()}
        found |= {f"input {i}": x.grad for i, x in enumerate(inputs)}
        results.append((output.detach(), output.requires_grad, found))
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)


PARTS: dict[str, Callable[[Joined], list[torch.Tensor]]] = {
    "nothing": lambda m: [],
    "all": lambda m: list(m.parameters()),
    "the tied weight": lambda m: [m.first.weight],
    "what is read without recording": lambda m: [m.scale],
}


@pytest.mark.slow
def test_every_choice_of_inputs_and_parameters(compilations: list[str]) -> None:
    plain = Joined().train()
    ours = add_tvm_dispatch(Joined().train(), tuple(_inputs(False, False)))
    # In this order, mostly only the frozen part changes from one choice to the next.
    choices = list(itertools.product((False, True), (False, True), PARTS.values()))
    for _ in range(2):
        for leaf, (x, y, frozen) in zip(itertools.cycle((True, False)), choices, strict=False):
            for each in (ours, plain):
                each.requires_grad_(True)
                for parameter in frozen(each):
                    parameter.requires_grad_(False)
            _assert_same(ours, plain, x, y, leaf=leaf)
        assert len(compilations) == len(choices) == 16
    report = dispatch_report(ours)
    assert (report.tvm_calls, report.fallbacks, report.dropped) == (32, {}, 0)


def test_without_recording_it_does_not_matter(compilations: list[str]) -> None:
    module = add_tvm_dispatch(Joined().eval(), tuple(_inputs(False, False)))
    plain = eager(module)
    for learns in (True, False, True):
        module.requires_grad_(learns)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                x = _inputs(learns, False)
                torch.testing.assert_close(module(*x), plain(*x))
    assert len(compilations) == 1
    assert dispatch_report(module).tvm_calls == 6


def test_of_too_many_calls_compile_none(compilations: list[str]) -> None:
    plain = Joined().train()
    module = Joined().train()
    add_tvm_dispatch(module, tuple(_inputs(False, False)), options={"max_specializations": 2})
    for _ in range(3):
        for choice in ((False, False), (True, False), (True, True), (False, True)):
            _assert_same(module, plain, *choice)
    report = dispatch_report(module)
    assert (len(compilations), report.tvm_calls, report.dropped) == (2, 6, 0)
    ((reason, count),) = report.fallbacks.items()
    assert (reason.startswith("there is code for max_specializations"), count) == (True, 6)


@pytest.mark.slow
def test_of_too_many_the_one_used_longest_ago_is_dropped_for_good(compilations: list[str]) -> None:
    plain = Joined().train()
    module = Joined().train()
    add_tvm_dispatch(module, tuple(_inputs(False, False)), options={"max_specializations": 2})
    for choice in ((False, False), (True, False), (False, False)):
        _assert_same(module, plain, *choice)
    add_tvm_dispatch(module, tuple(_inputs(True, True)))
    report = dispatch_report(module)
    assert (len(compilations), len(report.specializations), report.dropped) == (3, 2, 1)
    for _ in range(3):
        _assert_same(module, plain, False, False)
        _assert_same(module, plain, True, True)
        _assert_same(module, plain, True, False)
    report = dispatch_report(module)
    # Calls that dropped code has served are still counted.
    assert (len(compilations), report.tvm_calls) == (3, 9)
    ((reason, count),) = report.fallbacks.items()
    assert (reason.startswith(DROPPED), count) == (True, 3)
    add_tvm_dispatch(module, tuple(_inputs(True, False)))
    _assert_same(module, plain, True, False)
    report = dispatch_report(module)
    assert (len(compilations), len(report.specializations), report.dropped) == (4, 2, 2)
    assert sum(report.fallbacks.values()) == 3


def test_what_cannot_be_compiled_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Joined().train()
    module = add_tvm_dispatch(Joined().train(), tuple(_inputs(False, False)))
    tried = []

    def failing(*_: object, **__: object) -> None:
        tried.append(1)
        raise MemoryError("there is none")

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "compile_module", failing)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                _assert_same(module, plain, True, False)
                _assert_same(module, plain, False, False)
    warnings = [r for r in caplog.records if r.name.startswith("tvmbridge")]
    assert (len(tried), len(warnings)) == (1, 1)
    _assert_same(module, plain, True, False)
    report = dispatch_report(module)
    assert report.tvm_calls == 3
    assert report.fallbacks == {"train with gradients: there is none": 4}
    # The failed choice does not affect others, and a new dispatch compiles it again.
    _assert_same(module, plain, True, True)
    add_tvm_dispatch(module, tuple(_inputs(True, False)))
    _assert_same(module, plain, True, False)
    assert dispatch_report(module).tvm_calls == 5


class Scaled(nn.Module):
    """A linear layer times a number that is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.factor  # type: ignore[no-any-return]


def test_other_changes_of_the_module_remain_fallbacks(compilations: list[str]) -> None:
    module = Scaled().train()
    add_tvm_dispatch(module, sample(3, 4))
    plain = eager(module)
    assert isinstance(plain, Scaled)
    for each in (module, plain):
        each.factor = 3.0
    _assert_same(module, plain, True)
    assert len(compilations) == 1
    assert len(dispatch_report(module).fallbacks) == 1
    # Each factor has specializations of its own, one for each choice of gradients.
    add_tvm_dispatch(module, sample(3, 4))
    for factor in (3.0, 2.0, 3.0, 2.0):
        for each in (module, plain):
            each.factor = factor
        for learns in (True, False):
            _assert_same(module, plain, learns)
    assert len(compilations) == 4
    assert (dispatch_report(module).tvm_calls, len(dispatch_report(module).fallbacks)) == (8, 1)


def test_a_tensor_in_an_attribute_gets_its_gradient(compilations: list[str]) -> None:
    module = Scaled().train()
    module.factor = torch.ones(4, dtype=torch.float64)  # type: ignore[assignment]
    add_tvm_dispatch(module, sample(3, 4))
    module.factor.requires_grad_()  # type: ignore[attr-defined]
    for _ in range(3):
        _assert_same(module, eager(module), True)
    assert len(compilations) == 2
    assert dispatch_report(module).tvm_calls == 3


@pytest.mark.slow
def test_threads_that_ask_for_the_same_and_for_others(compilations: list[str]) -> None:
    module = add_tvm_dispatch(Joined().train(), tuple(_inputs(False, False)))
    plain, failures = eager(module), []

    def serve(number: int) -> None:
        try:
            for i in range(20):
                learn = bool(i + number & 1), bool(i + number & 2)
                results = []
                for called in (module, plain):
                    x = _inputs(*learn)
                    wanted = [*called.parameters(), *(t for t in x if t.requires_grad)]
                    out = called(*x)
                    results.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
                torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(compilations) == 4
    assert (dispatch_report(module).tvm_calls, dispatch_report(module).fallbacks) == (80, {})


def test_a_copy_has_the_code_and_compiles_for_itself(compilations: list[str]) -> None:
    plain = Joined().train()
    module = add_tvm_dispatch(Joined().train(), tuple(_inputs(False, False)))
    _assert_same(module, plain, True, False)
    duplicate = copy.deepcopy(module)
    for choice in ((False, False), (True, False)):
        _assert_same(duplicate, plain, *choice)
    assert len(compilations) == 2
    duplicate.requires_grad_(False)
    _assert_same(duplicate, eager(duplicate), True, True)
    assert len(compilations) == 3
    assert [dispatch_report(m).tvm_calls for m in (module, duplicate)] == [1, 3]
    assert len(dispatch_report(module).specializations) == 2


def test_each_choice_is_checked() -> None:
    plain, module = Joined().train(), Joined().train()
    add_tvm_dispatch(module, tuple(_inputs(False, False)), options={"check": "first"})
    for _ in range(2):
        for choice in ((False, False), (True, False)):
            _assert_same(module, plain, *choice)
    report = dispatch_report(module)
    assert [(s.calls, s.checked, s.checked_gradients) for s in report.specializations] == [
        (2, 1, 1)
    ] * 2
