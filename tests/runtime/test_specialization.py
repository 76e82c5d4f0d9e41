"""A module whose first call fills a cache is compiled again once the cache is filled."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from tests.thinned import but_slow
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.runtime import policy


class Cached(nn.Module):
    """Multiplies by a cached table, and adds the cached mean of its first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.tables: dict[Any, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = x.shape[-1], x.device
        if key not in self.tables:
            self.tables[key] = torch.arange(4.0), {"first": x.detach().mean(0)}
        table, averages = self.tables[key]
        return self.linear(x) * table + averages["first"]  # type: ignore[no-any-return]


def test_a_cache_of_tensors_is_filled_by_the_first_call_and_read_by_the_others() -> None:
    plain = Cached().train()
    module = add_tvm_dispatch(copy.deepcopy(plain), torch.randn(3, 4, dtype=torch.float64))
    assert not module.tables
    for _ in range(3):
        x = torch.randn(3, 4, dtype=torch.float64)
        found = []
        for called in (module, plain):
            out = called(x)
            found.append([out, *torch.autograd.grad(out.square().sum(), called.parameters())])
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (2, {"the attribute tables changed": 1})
    # A cache that is cleared later is noticed, but does not cause another compilation.
    for called in (module, plain):
        called.tables.clear()
    for _ in range(3):
        x = torch.randn(3, 4, dtype=torch.float64)
        torch.testing.assert_close(module(x), plain(x))
    assert dispatch_report(module).tvm_calls == 2


class Grown(nn.Module):
    """Multiplies by rows of a table in a buffer, which forward extends if it is too short."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("table", torch.zeros(0, 4, dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > len(self.table):
            rows = torch.arange(len(x) * 4, dtype=torch.float64)
            self.register_buffer("table", rows.view(-1, 4), persistent=False)
        return self.linear(x) * self.table[: len(x)]  # type: ignore[no-any-return]


def test_a_buffer_that_other_arguments_have_made_longer_is_compiled_for() -> None:
    plain = Grown().train()
    module = add_tvm_dispatch(copy.deepcopy(plain), torch.randn(3, 4, dtype=torch.float64))
    for rows in (5, 3, 3, 3):
        x = torch.randn(rows, 4, dtype=torch.float64)
        torch.testing.assert_close(module(x), plain(x))
        torch.testing.assert_close(module.table, plain.table)
    report = dispatch_report(module)
    assert report.tvm_calls == 2
    assert report.fallbacks == {
        "the shape of an input differs": 1,
        "the shape of a parameter or buffer changed": 1,
    }


@pytest.mark.parametrize("kind", but_slow([Cached, Grown], Cached))
def test_what_the_first_call_fills_and_inputs_that_learn(kind: type[nn.Module]) -> None:
    """Code for other choices of gradients is compiled only once the cache is filled."""
    plain = kind().train()
    module = add_tvm_dispatch(copy.deepcopy(plain), torch.randn(3, 4, dtype=torch.float64))
    rows = 5 if kind is Grown else 3
    for number, learns in ((rows, True), (3, True), (3, False), (3, True), (3, False)):
        x = torch.randn(number, 4, dtype=torch.float64, requires_grad=learns)
        found = []
        for called in (module, plain):
            out, wanted = called(x), [*called.parameters(), *([x] if learns else [])]
            found.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    calls = [s.calls for s in dispatch_report(module).specializations]
    assert (len(calls), sum(calls)) == (2, 3 if kind is Grown else 4)
    assert "requires_grad" not in str(dispatch_report(module).fallbacks)


@pytest.mark.slow
def test_a_copy_made_before_the_first_call_is_compiled_again_too() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    plain = Cached().eval()
    module = copy.deepcopy(add_tvm_dispatch(copy.deepcopy(plain), x))
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(module(x), plain(x))
    assert dispatch_report(module).tvm_calls == 2


@pytest.mark.slow
def test_code_that_another_thread_renews_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    module = add_tvm_dispatch(Cached().train(), x).eval()
    (specialization,) = module.forward.code.kept.known
    turns = policy.compiling

    @contextmanager
    def then_renewed_by_another() -> Iterator[None]:
        with turns():
            yield
        specialization.entries.clear()

    monkeypatch.setattr(policy, "compiling", then_renewed_by_another)
    with torch.no_grad():
        torch.testing.assert_close(module(x), module.forward.code.original(x))
