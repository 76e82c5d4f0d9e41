"""Values that forward reads outside the module: changes are noticed, or forward is refused."""

from __future__ import annotations

import argparse
import contextvars
import enum
import itertools
import math
import os
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.graph_capture.observe.reading import Model
from tvmbridge import CaptureError, add_tvm_dispatch, dispatch_report
from tvmbridge.core.errors import BridgeError
from tvmbridge.graph_capture.observe import outside
from tvmbridge.graph_capture.observe.objects import ObjectReads
from tvmbridge.graph_capture.observe.outside import OutsideReads

SCALE = 2.0
CONFIG = {"scale": 2.0, "names": ["a"]}
NESTED = types.SimpleNamespace(inner=types.SimpleNamespace(scale=2.0))
LOCAL = threading.local()
VARIABLE = contextvars.ContextVar("VARIABLE", default=2.0)
NUMPYS = numpy.random.default_rng(0)
PYTHONS = random.Random(0)
COUNTER = 0
NUMBERS = itertools.count(1)
TABLE: list[float] = []


class Settings:
    scale = 2.0

    def __init__(self) -> None:
        self.factor = 2.0

    def read(self) -> float:
        return self.factor


class OfClass:
    scale = 2.0
    tensor = torch.tensor(2.0)


class Mode(enum.Enum):
    FIRST = 1
    SECOND = 2


MODE = Mode.FIRST
ARGUMENTS = argparse.Namespace(scale=2.0)
SETTINGS = Settings()
OF_CLASS = OfClass()
TENSOR = torch.tensor(2.0)
TENSORS = {"scale": torch.tensor(2.0)}
THREE = torch.tensor(3.0)


def _helper() -> float:
    return SCALE


def _imported() -> float:
    from math import pi

    return pi


def _of_backends(_: Model) -> float:
    return 2.0 if torch.backends.mha.get_fastpath_enabled() else 3.0


def _precision(_: Model) -> float:
    return 2.0 if torch.get_float32_matmul_precision() == "highest" else 3.0


def _in_cell() -> Callable[..., Any]:
    held = 2.0

    def read(_: Model, new: float | None = None) -> float:
        nonlocal held
        held = held if new is None else new
        return held

    return read


CELL = _in_cell()
LOCAL.scale = 2.0
Patch = pytest.MonkeyPatch
CASES: dict[str, tuple[Callable[[Model], Any], Callable[[Patch], Any]]] = {
    "SCALE": (lambda _: SCALE, lambda p: p.setitem(globals(), "SCALE", 3.0)),
    "SCALE in a function": (lambda _: _helper(), lambda p: p.setitem(globals(), "SCALE", 3.0)),
    "CONFIG": (lambda _: CONFIG["scale"], lambda p: p.setitem(CONFIG, "scale", 3.0)),
    "NESTED": (lambda _: NESTED.inner.scale, lambda p: p.setattr(NESTED.inner, "scale", 3.0)),
    "NESTED (its inner)": (
        lambda _: NESTED.inner.scale,
        lambda p: p.setattr(NESTED, "inner", types.SimpleNamespace(scale=3.0)),
    ),
    "ARGUMENTS": (lambda _: ARGUMENTS.scale, lambda p: p.setattr(ARGUMENTS, "scale", 3.0)),
    "MODE": (
        lambda _: 2.0 if MODE is Mode.FIRST else 3.0,
        lambda p: p.setitem(globals(), "MODE", Mode.SECOND),
    ),
    "LOCAL.scale": (lambda _: LOCAL.scale, lambda p: p.setattr(LOCAL, "scale", 3.0)),
    "VARIABLE": (lambda _: VARIABLE.get(), lambda p: VARIABLE.set(3.0)),
    "Settings.scale": (lambda _: Settings.scale, lambda p: p.setattr(Settings, "scale", 3.0)),
    "SETTINGS": (lambda _: SETTINGS.read(), lambda p: p.setattr(SETTINGS, "factor", 3.0)),
    "Model.scale": (lambda m: type(m).scale, lambda p: p.setattr(Model, "scale", 3.0)),
    "TENSOR": (lambda _: TENSOR, lambda p: p.setitem(globals(), "TENSOR", THREE)),
    "TENSORS": (lambda _: TENSORS["scale"], lambda p: p.setitem(TENSORS, "scale", THREE)),
    "OF_CLASS": (lambda _: OF_CLASS.scale, lambda p: p.setattr(OF_CLASS, "scale", 3.0)),
    "OfClass.scale": (
        lambda _: OF_CLASS.scale,
        lambda p: p.setattr(OfClass, "scale", 3.0),
    ),
    "OfClass.tensor": (lambda _: OF_CLASS.tensor, lambda p: p.setattr(OfClass, "tensor", THREE)),
    "held": (CELL, lambda p: CELL(None, 3.0)),
    "math.pi": (lambda _: _imported(), lambda p: p.setattr(math, "pi", 3.0)),
    "os.environ": (
        lambda _: float(os.environ.get("TEST_SCALE", "2")),
        lambda p: p.setenv("TEST_SCALE", "3"),
    ),
    "torch.backends.mha.get_fastpath_enabled": (
        _of_backends,
        lambda p: torch.backends.mha.set_fastpath_enabled(False),
    ),
    "torch.get_float32_matmul_precision": (
        _precision,
        lambda p: torch.set_float32_matmul_precision("high"),
    ),
}


READS = tuple(read for read, _ in CASES.values())


def _all(model: Model) -> Any:
    found: Any = 1.0
    for read in READS:
        found = read(model) * found
    return found


def test_each_change_is_noticed() -> None:
    """Check one module that reads all values, since each case alone would be a compilation."""
    plain, x = Model(_all).eval(), torch.randn(4)
    VARIABLE.set(2.0)
    module = add_tvm_dispatch(Model(_all).eval(), x)
    expected: dict[str, int] = {}
    for name, (_, change) in CASES.items():
        torch.testing.assert_close(module(x), plain(x))
        assert dispatch_report(module).fallbacks == expected, name
        with pytest.MonkeyPatch.context() as patch:
            try:
                change(patch)
                torch.testing.assert_close(module(x), plain(x))
            finally:
                torch.set_float32_matmul_precision("highest")
                torch.backends.mha.set_fastpath_enabled(True)
                VARIABLE.set(2.0)
                CELL(None, 2.0)
        reason = f"{name.split(' ')[0]} outside of the module changed"
        if name != "torch.get_float32_matmul_precision":  # A mode of its own, compiled anew.
            expected[reason] = expected.get(reason, 0) + 1
        assert dispatch_report(module).fallbacks == expected, name


def _counting(_: Model) -> float:
    global COUNTER
    COUNTER += 1
    return COUNTER


def _of_default_generator(_: Model) -> torch.Tensor:
    state = torch.default_generator.get_state()
    drawn = torch.rand(4)
    torch.default_generator.set_state(state)
    return drawn


def _searching(_: Model) -> float:
    return float(globals()["SCALE"])


def _searching_itself(_: Model) -> float:
    return float(getattr(sys.modules[__name__], "SCA" + "LE"))


def _counting_in_class(model: Model) -> float:
    type(model).calls = getattr(type(model), "calls", 0) + 1  # type: ignore[attr-defined]
    return 2.0


MODULES: dict[nn.Module, float] = {nn.Identity(): 3.0}
BY_ID: dict[int, float] = {}


def _by_module(model: Model) -> float:
    return MODULES.get(model, 2.0)


def _by_own_id(self: Model) -> float:
    return BY_ID.get(id(self), 2.0)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (_by_module, "looks modules up in MODULES"),
        (_by_own_id, "asks for the id of self"),
        (_counting_in_class, "changes Model.calls outside of the module"),
        (_searching, r"searches its own globals by globals \(name what it reads\)"),
        (_searching_itself, "searches its own globals by sys.modules"),
        (_counting, "changes COUNTER outside of the module"),
        (lambda _: float(NUMPYS.random()), "changes NUMPYS outside of the module"),
        (lambda _: PYTHONS.random(), "changes PYTHONS outside of the module"),
        (lambda _: float(next(NUMBERS)), "reads the iterator NUMBERS"),
        (_of_default_generator, "uses torch.default_generator"),
        (lambda _: float(torch.backends.mkldnn.enabled), "reads torch.backends.mkldnn.enabled"),
    ],
)
def test_what_changes_at_each_call_is_refused(read: Callable[..., Any], message: str) -> None:
    state = PYTHONS.getstate()
    numpys = NUMPYS.bit_generator.state
    with pytest.raises(CaptureError, match=message):
        add_tvm_dispatch(Model(read).eval(), torch.randn(4))
    assert PYTHONS.getstate() == state
    assert NUMPYS.bit_generator.state == numpys


class Keyed:
    """An object that is no module, and whose hash is its address."""

    def __hash__(self) -> int:
        return id(self)


def test_the_id_of_what_is_no_module_is_no_effect() -> None:
    add_tvm_dispatch(Model(lambda _: float(len({Keyed()}))).eval(), torch.randn(4))


def _filled(_: Model) -> float:
    if not TABLE:
        TABLE.append(2.0)
    return TABLE[0]


def test_what_is_filled_once_is_as_calls_find_it() -> None:
    x = torch.randn(4)
    module = add_tvm_dispatch(Model(_filled).eval(), x)
    torch.testing.assert_close(module(x), x * 2)
    assert not dispatch_report(module).fallbacks
    TABLE[0] = 5.0
    torch.testing.assert_close(module(x), x * 5)


class Looking(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.__dict__.get("factor", 2.0)


def test_an_attribute_that_forward_looks_for_is_noticed_when_it_comes() -> None:
    plain, x = Looking().eval(), torch.randn(3)
    module = add_tvm_dispatch(Looking().eval(), x)
    torch.testing.assert_close(module(x), plain(x))
    assert not dispatch_report(module).fallbacks
    plain.factor = module.factor = 3.0
    torch.testing.assert_close(module(x), plain(x))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, drop: float) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(nn.Linear(3, 3), nn.Dropout(drop)), reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant, preserve_rng_state=False)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_that_draws_again_is_refused(reentrant: bool) -> None:
    x = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(BridgeError, match="preserve_rng_state=False"):
        add_tvm_dispatch(Checkpointed(reentrant, 0.5).train(), x)
    module = add_tvm_dispatch(Checkpointed(reentrant, 0.5).eval().requires_grad_(False), x)
    assert module(x).shape == (2, 3)


class Registry(dict[Any, Any]):
    """A dictionary that changes keys when it is written, so it cannot be copied entry by entry."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(f"class {key}", value)


REGISTRY = Registry()
REGISTRY["a"] = 2.0


def test_what_copies_itself_badly_is_watched_by_what_it_holds() -> None:
    x = torch.randn(4)
    module = add_tvm_dispatch(Model(lambda _: REGISTRY["class a"]).eval(), x)
    torch.testing.assert_close(module(x), x * 2)
    assert not dispatch_report(module).fallbacks
    REGISTRY["a"] = 3.0
    torch.testing.assert_close(module(x), x * 3)


def test_a_value_that_many_modules_share_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[Any] = []

    def decimal_context(value: Any) -> Iterator[Any]:
        met.append(value)
        return iter(())

    monkeypatch.setattr(outside, "decimal_context", decimal_context)
    model, config = nn.Sequential(*(nn.Identity() for _ in range(9))), Settings()
    for each in model:
        each.config, each.size, each.names = config, 3, []
    OutsideReads(model, ObjectReads())
    assert sum(value is config for value in met) == 1
    assert sum(type(value) is int or value == [] for value in met) == 0
