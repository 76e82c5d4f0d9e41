"""Changes inside attributes of unusual kinds, such as list subclasses, are noticed too."""

from __future__ import annotations

import array
import copy
import enum
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tests.dispatch_helpers import eager
from tvmbridge import CaptureError, add_tvm_dispatch, dispatch_report


class Power(enum.Enum):
    SQUARE = 2
    CUBE = 3


@dataclass(slots=True)
class Slotted:
    factor: float


class Listed(list):  # type: ignore[type-arg]
    """A list subclass whose instances have an attribute."""

    factor: float


class Bare:
    """An object with class attributes only."""

    factor = 2.0


VALUES: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "numpy array": (lambda: numpy.array([2.0, 3.0]), lambda v: float(v[0])),
    "array in a list": (lambda: [numpy.array([2.0])], lambda v: float(v[0][0])),
    "deque": (lambda: deque([2.0]), lambda v: v[0]),
    "slots": (lambda: Slotted(2.0), lambda v: v.factor),
    "array": (lambda: array.array("d", [2.0]), lambda v: v[0]),
    "bytes": (lambda: bytearray(b"ab"), lambda v: v[0] / 97),
    "decimal": (lambda: Decimal(2), float),
    "fraction": (lambda: Fraction(2), float),
    "enum": (lambda: Power.SQUARE, lambda v: float(v.value)),
    "attribute of a list": (lambda: Listed([1.0]), lambda v: getattr(v, "factor", 2.0)),
    "empty list": (list, lambda v: 2.0 if v else 1.0),
    "object without attributes": (Bare, lambda v: v.factor),
}


def _put(name: str, place: Any, value: Any) -> Callable[[Any], None]:
    if isinstance(place, str):
        return lambda m: setattr(m.values[name], place, value)
    return lambda m: m.values[name].__setitem__(place, value)


def _replace(name: str, value: Any) -> Callable[[Any], None]:
    return lambda m: m.values.__setitem__(name, value)


CHANGES: dict[str, Callable[[Any], None]] = {
    "numpy array": _put("numpy array", 0, 7.0),
    "array in a list": lambda m: m.values["array in a list"][0].fill(5.0),
    "deque": _put("deque", 0, 7.0),
    "slots": _put("slots", "factor", 7.0),
    "array": _put("array", 0, 7.0),
    "bytes": _put("bytes", 0, 7),
    "decimal": _replace("decimal", Decimal("2.5")),
    "fraction": _replace("fraction", Fraction(5, 2)),
    "enum": _replace("enum", Power.CUBE),
    "empty list": lambda m: m.values["empty list"].append(1),
    "object without attributes": _put("object without attributes", "factor", 3.0),
    "attribute of a list": _put("attribute of a list", "factor", 3.0),
}


class Holder(nn.Module):
    """Multiplies by a number read from each of its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.values = {name: make() for name, (make, _) in VALUES.items()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, (_, read) in VALUES.items():
            x = x * read(self.values[name])
        return x


@pytest.fixture(scope="module")
def holder() -> nn.Module:
    return add_tvm_dispatch(Holder().eval(), torch.ones(3))


@pytest.mark.parametrize("kind", VALUES)
def test_a_change_is_noticed(holder: nn.Module, kind: str) -> None:
    module = copy.deepcopy(holder)
    before = module(torch.ones(3))
    CHANGES[kind](module)
    after = module(torch.ones(3))
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, eager(module)(torch.ones(3)))
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (1, {"the attribute values changed": 1})


def test_no_change_is_none(holder: nn.Module) -> None:
    module = copy.deepcopy(holder)
    for _ in range(2):
        module(torch.ones(3))
        module.values = {name: make() for name, (make, _) in VALUES.items()}  # type: ignore[assignment]
    assert dispatch_report(module).tvm_calls == 2


def test_dispatch_after_a_change_compiles_for_it(holder: nn.Module) -> None:
    module = copy.deepcopy(holder)
    for name, times in (("enum", 2), ("deque", 3), ("enum", 3)):
        CHANGES[name](module)
        add_tvm_dispatch(module, torch.ones(3))
        torch.testing.assert_close(module(torch.ones(3)), eager(module)(torch.ones(3)))
        assert len(dispatch_report(module).specializations) == times
    module.values = {name: make() for name, (make, _) in VALUES.items()}  # type: ignore[assignment]
    torch.testing.assert_close(module(torch.ones(3)), eager(module)(torch.ones(3)))
    assert (dispatch_report(module).tvm_calls, dispatch_report(module).fallbacks) == (4, {})


class Uncopied(nn.Module):
    """Cannot be copied, so it is traced itself; the test changes its list in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.factors: list[Any] = [2.0, self.layer]

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is only one")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.factors[0]  # type: ignore[no-any-return]


def test_a_change_of_a_module_that_cannot_be_copied_is_noticed() -> None:
    module = add_tvm_dispatch(Uncopied().eval(), torch.ones(3))
    with torch.no_grad():
        before = module(torch.ones(3))
        module.factors[0] = 4.0  # type: ignore[index, operator]
        torch.testing.assert_close(module(torch.ones(3)), 2 * before)
    assert dispatch_report(module).fallbacks == {"the attribute factors changed": 1}


@pytest.mark.parametrize("values", [iter(range(1, 9)), list(range(1, 9)).__iter__()])
def test_iterators_are_refused_by_name(values: Any) -> None:
    class Iterates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values = values

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * next(self.values)

    with pytest.raises(CaptureError, match="reads the iterator values"):
        add_tvm_dispatch(Iterates().eval(), torch.ones(3))


class Scaled(nn.Module):
    """Reads class attributes, which a subclass could override later."""

    scale = 2.0
    shifts = [1.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shifts[0]


class Between(Scaled):
    """A subclass without attributes of its own."""


def _rescale(_: nn.Module) -> None:
    Scaled.scale = 3.0


def _shift(_: nn.Module) -> None:
    Scaled.shifts[0] = 4.0


def _hide_in_class(_: nn.Module) -> None:
    Between.scale = 5.0


def _hide_in_instance(module: nn.Module) -> None:
    module.scale = 6.0  # type: ignore[assignment]


def test_changed_attributes_of_classes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scaled, "scale", 2.0)
    monkeypatch.setattr(Scaled, "shifts", [1.0])
    monkeypatch.setattr(Between, "scale", 2.0)
    monkeypatch.delattr(Between, "scale")
    x = torch.linspace(-1, 1, 5)
    original = add_tvm_dispatch(Between().eval(), x)
    for module in (original, copy.deepcopy(original)):
        torch.testing.assert_close(module(x), x * 2 + 1)
        assert not dispatch_report(module).fallbacks
    changes = {_rescale: 3 * x + 1, _shift: 3 * x + 4, _hide_in_class: 5 * x + 4}
    for change, expected in {**changes, _hide_in_instance: 6 * x + 4}.items():
        module = copy.deepcopy(original)
        change(module)
        torch.testing.assert_close(module(x), expected)
        (reason,) = dispatch_report(module).fallbacks
        assert reason in ("the attribute scale changed", "the attribute shifts changed")


class Locked:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.factor = 2.0


class WithLock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = Locked()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.held.factor


def test_changes_beside_a_lock_are_noticed() -> None:
    x = torch.ones(3)
    module = add_tvm_dispatch(WithLock().eval(), x)
    assert torch.equal(module(x), x * 2)
    assert not dispatch_report(module).fallbacks
    module.held.factor = 3.0  # type: ignore[union-attr]
    assert torch.equal(module(x), x * 3)


class Unmeasured(tuple):  # type: ignore[type-arg]
    """A tuple whose ``len`` raises an error, as e3nn's group representations do."""

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError


class WithPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Unmeasured((2.0, 1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.pair[0] + self.pair[1]


def test_tuples_without_a_length_are_read_and_watched() -> None:
    x = torch.ones(3)
    module = add_tvm_dispatch(WithPair().eval(), x)
    assert torch.equal(module(x), x * 3)
    assert not dispatch_report(module).fallbacks
    module.pair = Unmeasured((4.0, 1.0))
    assert torch.equal(module(x), x * 5)
    assert list(dispatch_report(module).fallbacks) == ["the attribute pair changed"]
