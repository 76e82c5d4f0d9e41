"""A module in parts is timed as a whole, and lasting fallbacks cost no Python of the dispatcher."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.timed_calls import CLOCK, SECONDS, slow_own, timed_by_sleeping
from tvmbridge import FallbackError, add_tvm_dispatch, dispatch_report
from tvmbridge.runtime.guards.watch import native_half
from tvmbridge.runtime.parts import Cut

# One call that compiles, three to warm up, and five timed ones of each kind.
TRIAL = 14

pytestmark = pytest.mark.usefixtures(timed_by_sleeping.__name__)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = (x * 2 + 1).sin().relu()
        chosen = x[x.sum(1) > 2]
        return (self.linear(chosen) * 3 + 1).tanh().cos()


class Refused(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy((x * 2).detach().numpy() + 1)


def graphs(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def slow_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = Cut.run

    def run(cut: Cut, of: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        CLOCK.sleep(SECONDS)
        return genuine(cut, of, args, kwargs)

    monkeypatch.setattr(Cut, "run", run)


def evaluated_pair() -> tuple[nn.Module, nn.Module]:
    reference = Masked().eval()
    return add_tvm_dispatch(copy.deepcopy(reference), on_fallback="silent"), reference


def evaluated(module: nn.Module, reference: nn.Module, calls: int, rows: int = 40) -> None:
    with torch.no_grad():
        for i in range(calls):
            x = graphs(rows + i % 3, i)
            torch.testing.assert_close(module(x), reference(x))


def test_slower_parts_step_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_parts(monkeypatch)
    module, reference = evaluated_pair()
    evaluated(module, reference, 40)
    report = dispatch_report(module)
    assert report.tvm_calls + report.timed_calls + report.aside_calls == 40
    assert report.aside_calls >= 20
    assert report.share == 1
    (verdict,) = report.of_parts[2]
    assert not verdict.pays
    assert "speed, in parts: a call takes" in " ".join(str(report).split())
    if native_half() is not None:
        assert sum(each.calls for each in module.forward.code.paths.asides) > 15
    # Many more rows have a trial of their own.
    evaluated(module, reference, 2, rows=400)
    assert dispatch_report(module).aside_calls == report.aside_calls


def test_faster_parts_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_own(monkeypatch)
    module, reference = evaluated_pair()
    evaluated(module, reference, 30)
    report = dispatch_report(module)
    assert report.aside_calls == 0
    assert report.tvm_calls + report.timed_calls == 30
    assert report.of_parts[2][0].pays


def test_training_in_parts_is_timed_with_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_parts(monkeypatch)
    reference = Masked()
    module = add_tvm_dispatch(copy.deepcopy(reference), on_fallback="silent")
    for i in range(TRIAL + 10):
        for each in (module, reference):
            each.zero_grad()
            each(graphs(40, i)).sum().backward()
        torch.testing.assert_close(module.linear.weight.grad, reference.linear.weight.grad)
    assert dispatch_report(module).aside_calls > 5


def test_nothing_is_timed_where_each_call_must_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_parts(monkeypatch)
    module = add_tvm_dispatch(Masked().eval(), on_fallback="raise")
    with torch.no_grad():
        for i in range(TRIAL + 4):
            module(graphs(40, i))
    report = dispatch_report(module)
    assert (report.tvm_calls, report.timed_calls, report.aside_calls) == (TRIAL + 4, 0, 0)


def test_calls_with_a_lasting_reason_are_passed_on_and_counted() -> None:
    module = add_tvm_dispatch(Refused().eval(), on_fallback="silent")
    for i in range(60):
        x = graphs(4, i)
        assert torch.equal(module(x), x * 2 + 1)
    report = dispatch_report(module)
    assert sum(report.fallbacks.values()) == 60
    if native_half() is not None:
        (native,) = module.forward.code.paths.asides
        assert native.calls > 40
        add_tvm_dispatch(module)  # which may change how calls are served
        assert not module.forward.code.paths.asides
    x = graphs(5)
    assert torch.equal(module(x), x * 2 + 1)


def test_calls_with_a_lasting_reason_go_on_to_raise() -> None:
    module = add_tvm_dispatch(Refused().eval(), on_fallback="raise")
    for _ in range(20):
        with pytest.raises(FallbackError):
            module(graphs(4))
    assert sum(dispatch_report(module).fallbacks.values()) == 20
