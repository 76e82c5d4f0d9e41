"""Dictionary watches notice every kind of change, in the C++ and the Python implementation."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from tvmbridge.core.compiled_half import compiled_half
from tvmbridge.core.contents import MISSING
from tvmbridge.runtime.guards.watch import PythonWatch, dict_of_class


class Plain:
    """An object with one attribute."""

    def __init__(self) -> None:
        self.x = object()


def set_x(held: Any) -> None:
    held.x = object()


def set_many(held: Any) -> None:
    for number in range(40):
        setattr(held, f"a{number}", number)


# By name: the object, and a function that changes it.
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "an attribute": (Plain, set_x),
    "an attribute of a module": (nn.ReLU, set_x),
    "an attribute, past __setattr__": (Plain, lambda h: object.__setattr__(h, "x", 2)),
    "a new attribute": (Plain, lambda h: setattr(h, "y", 1)),
    "many new attributes": (Plain, set_many),
    "a deleted attribute": (Plain, lambda h: delattr(h, "x")),
    "an entry": (Plain, lambda h: h.__dict__.__setitem__("x", 2)),
    "update": (Plain, lambda h: h.__dict__.update(x=2)),
    "clear": (Plain, lambda h: h.__dict__.clear()),
    "pop": (Plain, lambda h: h.__dict__.pop("x")),
    "another order": (Plain, lambda h: h.__dict__.update(x=h.__dict__.pop("x"), y=1)),
}


@pytest.fixture(params=["compiled", "python"])
def made(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A function that creates a watch of dictionaries: in C++ or in Python."""
    if request.param == "python":
        return lambda *dicts: PythonWatch(dicts, (), ())
    native = compiled_half("tvmbridge.runtime._native")
    if native is None:
        pytest.skip("the compiled half is missing")
    return lambda *dicts: native.Watch(dicts, (), (), (), (), (), MISSING)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(made: Callable[..., Any], name: str) -> None:
    make, change = CHANGES[name]
    for _ in range(70):  # until CPython has specialized the bytecode of the change
        changed, kept = make(), make()
        first, second = made(changed.__dict__, kept.__dict__), made(kept.__dict__)
        assert first.unchanged()
        change(changed)
        assert not first.unchanged()
        assert second.unchanged()


def test_an_entry_that_is_again_what_it_was_is_no_change(made: Callable[..., Any]) -> None:
    """FSDP sets sharded parameters after a call, and gathered ones before the next."""
    held, other = Plain(), Plain()
    watch, before = made(other.__dict__, held.__dict__), held.x
    for _ in range(3):
        held.x = object()
        assert not watch.unchanged()
        held.x = before
        assert watch.unchanged()
        assert watch.unchanged()
    other.x = None
    assert not watch.unchanged()


def test_attributes_of_classes_are_noticed(made: Callable[..., Any]) -> None:
    class Changed:
        x = 1

    for change in (lambda: setattr(Changed, "x", 2), lambda: setattr(Changed, "y", 2)):
        watch = made(dict_of_class(Changed))
        assert watch.unchanged()
        change()
        assert not watch.unchanged()


def test_a_value_that_takes_the_place_of_a_freed_one_is_noticed(made: Callable[..., Any]) -> None:
    for _ in range(50):
        held = Plain()
        watch = made(held.__dict__)
        held.x = None
        held.x = object()  # may get the address of the first object, which is freed
        assert not watch.unchanged()


def test_watches_end_in_any_order(made: Callable[..., Any]) -> None:
    held = Plain()
    watches = [made(held.__dict__) for _ in range(3)]
    del watches[1]
    gc.collect()
    assert all(watch.unchanged() for watch in watches)
    del watches[0]
    set_x(held)
    assert not watches[0].unchanged()
    watches.clear()
    set_x(held)  # no watch exists any more
    assert made(held.__dict__).unchanged()
