"""Two values that forward can tell apart have two digests."""

from __future__ import annotations

import collections
import contextvars
import types
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tvmbridge.recall.describe import Describer


class Terse:
    """An object whose text does not show what it holds."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "Terse()"


def _spaces(value: float) -> Any:
    table = numpy.zeros(3000)
    table[1500] = value
    return {
        "an object in a namespace": types.SimpleNamespace(held=Terse(value)),
        "an array in a namespace": types.SimpleNamespace(held=table),
        "a digit of a namespace": types.SimpleNamespace(held=numpy.float64(1 + value * 1e-15)),
        "the default of a variable": contextvars.ContextVar("of test", default=value),
        "a variable": _set(contextvars.ContextVar("of test"), value),
    }


def _set(variable: contextvars.ContextVar[float], value: float) -> contextvars.ContextVar[float]:
    variable.set(value)
    return variable


@pytest.mark.parametrize("kind", _spaces(0.0))
def test_values_that_differ_have_two_digests(kind: str) -> None:
    module = nn.Identity()
    one, same, other = (Describer(module).of(_spaces(value)[kind]) for value in (1.0, 1.0, 2.0))
    assert one == same
    assert one != other


class Lazy(collections.OrderedDict[str, Any]):
    """A mapping that would import each of its values."""

    def __init__(self, names: dict[str, float]) -> None:
        super().__init__()
        self._names = names

    def items(self) -> Any:
        raise ValueError("could not import")


def test_the_methods_of_a_mapping_are_not_called() -> None:
    module = nn.Identity()
    made = [Lazy({"a": value}) for value in (1.0, 1.0, 2.0)]
    one, same, other = (Describer(module).of(each) for each in made)
    assert one == same != other
    made[0]["held"] = 3.0
    assert Describer(module).of(made[0]) != one


def test_a_variable_without_a_value_is_described() -> None:
    module, empty = nn.Identity(), contextvars.ContextVar[float]("of test")
    assert Describer(module).of(empty) != Describer(module).of(_set(empty, 1.0))


def test_a_replaced_method_of_a_class_of_pytorch_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = nn.Identity()
    digests = [Describer(module).of(torch.distributions.Normal)]
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributions.Normal, "log_prob", lambda self, value: value)
        digests.append(Describer(module).of(torch.distributions.Normal))
    with monkeypatch.context() as patch:
        patch.setattr("torch.distributions.normal.broadcast_all", lambda *values: values)
        digests.append(Describer(module).of(torch.distributions.Normal))
    assert len(set(digests)) == 3
    assert Describer(module).of(torch.distributions.Normal) == digests[0]
