"""Without a sample, code is compiled at a call, for its arguments and under its PyTorch modes."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.dispatch_helpers import assert_same_step, eager, make_block, sample
from tvmbridge import CaptureError, FallbackError, add_tvm_dispatch, dispatch_report

CONSTANT = "an argument that is not a tensor differs"


class AnyMode(TorchFunctionMode):
    """A user's function mode, which changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_each_mode_is_compiled_at_its_first_call(compilations: list[str]) -> None:
    module = add_tvm_dispatch(make_block().train())
    assert compilations == []
    assert dispatch_report(module).share == 0
    reference = eager(module)
    for _ in range(2):
        assert_same_step(module, reference, sample())
    for each in (module, reference):
        each.eval()
    with torch.no_grad():
        torch.testing.assert_close(module(sample()), reference(sample()))
    with torch.inference_mode():
        torch.testing.assert_close(module(sample()), reference(sample()))
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (4, {})
    assert [s.mode for s in report.specializations] == ["train with gradients", "eval"]
    assert len(compilations) == 2


def test_what_eager_refuses_is_eagers_own_error(compilations: list[str]) -> None:
    module = add_tvm_dispatch(make_block().eval())
    for call in (lambda: module(), lambda: module(sample(6, 3)), lambda: module(sample(), 1)):
        with pytest.raises((TypeError, RuntimeError)) as ours:
            call()
        assert not isinstance(ours.value, FallbackError)
    torch.testing.assert_close(module(sample()), eager(module)(sample()))
    assert dispatch_report(module).tvm_calls == 1
    assert len(compilations) == 2  # only calls that match forward's signature are compiled


def test_further_signatures_are_compiled_up_to_a_number(compilations: list[str]) -> None:
    module = add_tvm_dispatch(make_block().eval())
    reference = eager(module)
    with torch.no_grad():
        for _ in range(2):
            for rows in range(1, 7):
                torch.testing.assert_close(module(sample(rows, 24)), reference(sample(rows, 24)))
    report = dispatch_report(module)
    # Code for any size serves the sizes behind the fourth.
    assert (len(compilations), report.tvm_calls, report.fallbacks) == (4, 12, {})
    # A sample adds another specialization beyond the limit.
    add_tvm_dispatch(module, sample(9, 24))
    module(sample(9, 24))
    assert dispatch_report(module).tvm_calls == 13


@pytest.mark.slow
def test_fewer_where_the_options_say_so(compilations: list[str]) -> None:
    module = add_tvm_dispatch(make_block().eval(), options={"max_specializations": 2})
    for rows in (2, 3, 4, 2, 3, 4):
        module(sample(rows, 24))
    assert len(compilations) == 2
    assert dispatch_report(module).tvm_calls == 6


class Repeats(nn.Module):
    def forward(self, x: torch.Tensor, items: Any = None, **more: Any) -> torch.Tensor:
        for key in more:
            x = x + len(key)
        if items is None:
            return x
        return x.sum() / (items if isinstance(items, torch.Tensor) else len(range(items)))


def test_a_number_that_changes_is_not_compiled_for_again_and_again(compilations: list[str]) -> None:
    module = add_tvm_dispatch(Repeats().eval())
    for items in range(1, 6):
        torch.testing.assert_close(module(sample(), items), sample().sum() / items)
    report = dispatch_report(module)
    # The second value is tried as an input first, which forward refuses; then parts are tried.
    assert (len(compilations), report.tvm_calls) == (3, 2)
    (of_parts,) = report.fallbacks.keys() - {CONSTANT}
    assert "argument `items` is no input of the code, because forward uses it as" in of_parts
    assert report.fallbacks == {of_parts: 1, CONSTANT: 2}
    example = "argument `items`: 4, compiled for 1; it is no input, because forward uses it as an"
    assert report.examples[CONSTANT].startswith(example)
    assert "0-dimensional tensor" in str(report.advice)
    # A tensor argument is an input, so one specialization serves all values.
    for items in range(1, 6):
        torch.testing.assert_close(module(sample(), torch.tensor(items)), sample().sum() / items)
    assert len(compilations) == 4
    assert dispatch_report(module).tvm_calls == 7


def test_what_passes_does_not_hinder_later_calls(compilations: list[str]) -> None:
    module = add_tvm_dispatch(make_block(dtype=torch.float32).eval())
    x = sample(dtype=torch.float32)
    with AnyMode():
        torch.testing.assert_close(module(x), eager(module)(x))
    assert compilations == []
    hook = module.inner.register_full_backward_hook(lambda *_: None)  # type: ignore[union-attr, operator]
    module(x)
    hook.remove()
    torch.testing.assert_close(module(x), eager(module)(x))
    report = dispatch_report(module)
    assert (report.tvm_calls, set(report.fallbacks)) == (
        1,
        {"a function mode is active", "a submodule has hooks"},
    )


def test_what_is_refused_at_sight_is_refused_at_dispatch() -> None:
    module = torch.jit.script(nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match="ScriptModule"):
        add_tvm_dispatch(module)
    with pytest.raises(ValueError, match="not dispatched"):
        dispatch_report(module)


class Fills(nn.Module):
    """Sets an attribute at its first call."""

    kind: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind is None:
            self.kind = "float" if x.is_floating_point() else "whole"
        return x * len(self.kind)


@pytest.mark.parametrize("on_fallback", ["warn", "raise"])
def test_what_the_first_call_settles_is_no_warning(
    on_fallback: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module = add_tvm_dispatch(Fills().eval(), on_fallback=on_fallback)
    with caplog.at_level(logging.WARNING, "tvmbridge"):
        for _ in range(3):
            torch.testing.assert_close(module(sample()), sample() * 5)
    assert not caplog.records
    report = dispatch_report(module)
    assert report.tvm_calls >= 2
    assert report.advice is None


class Holds:
    """An object that is no registered pytree, so that PyTorch does not find its tensor."""

    y: torch.Tensor

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class ReadsHeld(nn.Module):
    def forward(self, held: Holds) -> torch.Tensor:
        return held.x * 2


def test_an_object_with_tensors_is_named_with_what_to_pass_instead(compilations: list[str]) -> None:
    module = add_tvm_dispatch(ReadsHeld().eval(), on_break="forward")
    for value in range(3):
        x = torch.full((2,), float(value))
        assert torch.equal(module(Holds(x)), x * 2)
    report = dispatch_report(module)
    assert report.examples == {
        "an argument is an object whose tensors PyTorch does not see": "argument `held`: a Holds"
    }
    assert sum(report.fallbacks.values()) == 3
    assert report.advice is not None
    assert "pass the tensors in it" in report.advice
    assert not compilations
    with pytest.raises(CaptureError, match="argument 0 is a Holds"):
        add_tvm_dispatch(module, (Holds(torch.ones(2)),))


class WritesHeld(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, held: Holds) -> Holds:
        held.y = self.body(held.x).softmax(-1)
        return held


def test_an_object_with_tensors_is_served_in_parts() -> None:
    module = WritesHeld()
    reference = copy.deepcopy(module)
    add_tvm_dispatch(module)
    for _ in range(4):
        x = torch.randn(5, 4)
        held, expected = module(Holds(x)), reference(Holds(x))
        torch.testing.assert_close(held.y, expected.y)
        held.y.square().sum().backward()
        expected.y.square().sum().backward()
        assert held.x is x
    for mine, other in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (4, {})
    assert "argument `held`: a Holds" in report.cut


def test_four_strings_are_compiled_and_a_fifth_is_named() -> None:
    class Chooses(nn.Module):
        def forward(self, x: torch.Tensor, name: str = "sin") -> torch.Tensor:
            return getattr(torch, name)(x)

    module, x = add_tvm_dispatch(Chooses().eval()), sample()
    names = ["sin", "cos", "tanh", "exp", "neg"]
    for name in names * 2:
        torch.testing.assert_close(module(x, name), getattr(torch, name)(x))
    report = dispatch_report(module)
    assert report.tvm_calls == 8
    differs = "a string, a bool or None differs"
    # The first such call tries parts.
    small = f"{differs}; no part of it is large enough to be compiled"
    assert report.fallbacks == {small: 1, differs: 1}
    assert "the same kinds" in report.reasons[differs].advice
