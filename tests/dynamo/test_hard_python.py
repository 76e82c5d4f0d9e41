"""Python that tracers find hard, through the backend: results equal eager's; reports are right."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tvmbridge
from tests.dynamo.steps import assert_same
from tests.thinned import but_slow


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))


class Generators(Base):
    def each(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for layer in self.layers:
            x = layer(x).relu()
            yield x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(y.sin() for y in self.each(x))


class Closures(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().mean()
        count = 0

        def scaled(v: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            return self.linear(v) * scale * count

        return scaled(scaled(x)).tanh()


@dataclasses.dataclass
class State:
    hidden: torch.Tensor
    steps: int = 0
    seen: list[torch.Tensor] = dataclasses.field(default_factory=list)


class DataClasses(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = State(x)
        for layer in self.layers:
            state.seen.append(state.hidden)
            state = dataclasses.replace(state, hidden=layer(state.hidden), steps=state.steps + 1)
        return state.hidden * state.steps + torch.stack(state.seen).sum(0)


class Keywords(Base):
    def scaled(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        y = self.linear(x) * options.get("scale", 1.0)
        return y.relu() if options.pop("relu", False) else y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = {"scale": 2.0, "relu": True}
        return self.scaled(x, **given) + self.scaled(x, scale=0.5)


class Lists(Base):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        found: list[torch.Tensor] = []
        for i, layer in enumerate(self.layers):
            found.append(layer(found[-1] if found else x).sin())
            if i == 1:
                found.insert(0, found.pop().cos())
        return {"all": found, "last": torch.cat(found, dim=-1)}


class Attributes(Base):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = self.linear(x).relu()
        return self.last.sin() * 2


class Tries(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            y = self.missing(x)
        except AttributeError:
            y = self.linear(x)
        finally:
            x = x + 1
        return y.relu() * x


class EarlyReturns(Base):
    def forward(self, x: torch.Tensor, deep: bool) -> torch.Tensor:
        y = self.linear(x).relu()
        if not deep:
            return y.sin() + 1
        for layer in self.layers:
            y = layer(y).tanh()
        return y


class Branches(Base):
    """A branch on the values of a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).relu().sin()
        y = y * 2 + 1 if y.sum() > x.sum() else y.cos() * 3
        return self.layers[0](y).tanh()


class Recursion(Base):
    def tree(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        if depth == 0:
            return self.linear(x)
        return self.tree(x, depth - 1).relu() + self.tree(x * 0.5, depth - 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tree(x, 3)


class Printing(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).relu() * 2
        logging.getLogger("tests").warning("in forward")
        print("in forward")
        return self.layers[0](y).tanh() + 1


class Numbers(Base):
    """A value read by ``.item()`` that is used as a number but decides no branch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).relu()
        return y * float(y.detach().sum().item()) + 1


WHOLE = [Generators, Closures, DataClasses, Lists, Attributes, Keywords, Tries, Recursion]
BROKEN = [Branches, Printing, Numbers]


def calls() -> list[list[Any]]:
    return [[torch.randn(4, 8, requires_grad=True)], [torch.randn(4, 8)]]


@pytest.mark.parametrize("kind", but_slow(WHOLE, *WHOLE[2:]))
def test_captured_whole(kind: type[nn.Module]) -> None:
    assert_same(kind(), calls())
    assert tvmbridge.compile_report().whole


@pytest.mark.parametrize("kind", but_slow(BROKEN, Printing, Numbers))
def test_captured_in_parts(kind: type[nn.Module]) -> None:
    assert_same(kind(), calls())
    report = tvmbridge.compile_report()
    assert report.breaks
    assert report.share == 1
    assert not report.whole


def test_the_report_says_what_to_do_about_a_module_without_a_graph() -> None:
    module = nn.LSTM(4, 4)
    compiled = torch.compile(module, backend="tvmbridge")
    x = torch.randn(3, 2, 4)
    torch.testing.assert_close(compiled(x), module(x))
    text = " ".join(str(tvmbridge.compile_report()).split())
    assert "what to do: " in text
    assert "Set torch._dynamo.config.allow_rnn=True" in text
    assert "has the compiled module been called" not in text


def test_early_returns() -> None:
    assert_same(EarlyReturns(), [[torch.randn(4, 8), deep] for deep in (True, False, True)])
    report = tvmbridge.compile_report()
    assert report.whole
    assert len(report.graphs) == 2


def test_attributes_written_in_forward_are_those_of_eager() -> None:
    module = Attributes()
    compiled = tvmbridge.compile(module)
    for _ in range(3):
        x = torch.randn(4, 8)
        y = compiled(x)
        torch.testing.assert_close(y, module.last.sin() * 2)
        torch.testing.assert_close(module.last, module.linear(x).relu())
    assert module.calls == 3
    y.sum().backward()
    assert module.linear.weight.grad is not None
