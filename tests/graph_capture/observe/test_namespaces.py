"""The guard notices changes of values that forward finds by other ways than their names."""

from __future__ import annotations

import builtins
import functools
import importlib
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.graph_capture.observe.reading import Model
from tvmbridge import add_tvm_dispatch, dispatch_report


class Holder:
    scale = 2.0

    def __init__(self) -> None:
        self.held = 2.0


class Single:
    instance: Any = None

    def __init__(self) -> None:
        self.held = 2.0

    @classmethod
    def get(cls) -> Any:
        cls.instance = cls.instance or cls()
        return cls.instance


class Locked:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.held = [2.0]


class Empty:
    @property
    def scale(self) -> float:
        return float(self.__dict__.get("held", 2.0))


LOCKED = Locked()
EMPTY = Empty()
CIRCLE: list[Any] = [2.0]
CIRCLE.append(types.SimpleNamespace(circle=CIRCLE))
SCALE = 2.0
NAME = "".join(("SC", "ALE"))
TABLE = {"scale": 2.0}
OBJECTS = [Holder()]
Single.get()
settings: Any = types.ModuleType("settings_of_a_test")
settings.SCALE = 2.0
sys.modules["settings_of_a_test"] = settings
builtins.scale_of_a_test = 2.0  # type: ignore[attr-defined]


def _by_default(_: Model, table: dict[str, float] = TABLE) -> float:
    return table["scale"]


def _in_a_variable(_: Model) -> float:
    found = settings
    return float(found.SCALE)


def _imported(_: Model) -> Any:
    import settings_of_a_test as found  # type: ignore[import-not-found]

    return getattr(found, NAME)


def _if_there_is(_: Model) -> float:
    try:
        return float(LATER)  # type: ignore[name-defined]
    except NameError:
        return 2.0


@functools.lru_cache
def _cached() -> float:
    return SCALE


def _set_cached(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(globals(), "SCALE", 3.0)
    _cached.cache_clear()


Patch = pytest.MonkeyPatch


def _global(patch: Patch) -> None:
    patch.setitem(globals(), "SCALE", 3.0)


def _setting(patch: Patch) -> None:
    patch.setattr(settings, "SCALE", 3.0)


def _table(patch: Patch) -> None:
    patch.setitem(TABLE, "scale", 3.0)


CASES: dict[str, tuple[Callable[[Model], Any], Callable[[Patch], Any]]] = {
    "vars of a module": (lambda _: vars(settings)["SCALE"], _setting),
    "getattr by a computed name": (lambda _: getattr(settings, NAME), _setting),
    "a module in a variable": (_in_a_variable, _setting),
    "an imported module": (_imported, _setting),
    "sys.modules": (lambda _: sys.modules["settings_of_a_test"].SCALE, _setting),
    "importlib": (lambda _: importlib.import_module("settings_of_a_test").SCALE, _setting),
    "getattr of a class": (
        lambda _: getattr(Holder, "scale"),  # noqa: B009
        lambda p: p.setattr(Holder, "scale", 3.0),
    ),
    "a name that comes later": (
        _if_there_is,
        lambda p: p.setitem(globals(), "LATER", 3.0),
    ),
    "a name of a module that comes later": (
        lambda _: getattr(settings, "LATER", 2.0),
        lambda p: p.setattr(settings, "LATER", 3.0, raising=False),
    ),
    "an attribute of the own class that comes later": (
        lambda m: getattr(m, "later", 2.0),
        lambda p: p.setattr(Model, "later", 3.0, raising=False),
    ),
    "an object with a lock": (
        lambda _: LOCKED.held[0],
        lambda p: p.setattr(LOCKED, "held", [3.0]),
    ),
    "an object that holds nothing yet": (
        lambda _: EMPTY.scale,
        lambda p: p.setitem(EMPTY.__dict__, "held", 3.0),
    ),
    "a list that holds itself": (
        lambda _: CIRCLE[0],
        lambda p: p.setitem(globals(), "CIRCLE", [3.0]),
    ),
    "builtins": (
        lambda _: scale_of_a_test,  # type: ignore[name-defined]  # noqa: F821
        lambda p: p.setattr(builtins, "scale_of_a_test", 3.0),
    ),
    "a default": (_by_default, _table),
    "an object in a list": (
        lambda _: OBJECTS[0].held,
        lambda p: p.setattr(OBJECTS[0], "held", 3.0),
    ),
    "the only object of a class": (
        lambda _: Single.get().held,
        lambda p: p.setattr(Single.get(), "held", 3.0),
    ),
    "a function whose results are kept": (lambda _: _cached(), _set_cached),
}


READS = tuple(read for read, _ in CASES.values())


def _all(model: Model) -> Any:
    found = 1.0
    for read in READS:
        found = read(model) * found
    return found


def test_each_change_is_noticed() -> None:
    """Check one module that reads all values, since each case alone would be a compilation."""
    plain, x = Model(_all).eval(), torch.randn(4)
    _cached()
    module = add_tvm_dispatch(Model(_all).eval(), x)
    for number, (name, (_, change)) in enumerate(CASES.items()):
        torch.testing.assert_close(module(x), plain(x))
        assert sum(dispatch_report(module).fallbacks.values()) == number, name
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            torch.testing.assert_close(module(x), plain(x))
        _cached.cache_clear()
    reasons = dispatch_report(module).fallbacks
    assert sum(reasons.values()) == len(CASES)
    assert all(reason.endswith("changed") for reason in reasons)
