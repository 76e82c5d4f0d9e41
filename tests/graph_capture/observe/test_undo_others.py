"""An undo takes back what runs of forward changed, and nothing that other code changed."""

from __future__ import annotations

import array
import itertools
import os
import queue
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tvmbridge import CaptureError, add_tvm_dispatch, dispatch_report
from tvmbridge.graph_capture.observe.snapshots import write
from tvmbridge.graph_capture.observe.undo import Undo, undone_if_refused

LOG: list[int] = []
ORDERED: OrderedDict[str, int] = OrderedDict(a=1, b=2)


class Schedule:
    """An iterator whose whole state is in its attributes."""

    def __init__(self) -> None:
        self.value = 2.0

    def __iter__(self) -> Iterator[float]:
        return self

    def __next__(self) -> float:
        self.value += 1
        return self.value


class Tracker:
    def __init__(self) -> None:
        self.enabled = False
        self.numbers = itertools.count()

    def hit(self) -> float:
        return float(next(self.numbers))


SCHEDULE, TRACKER = Schedule(), Tracker()


class Model(nn.Module):
    def __init__(self, act: Callable[[], float]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.act()).sin()


def _refused(act: Callable[[], float]) -> None:
    before = list(LOG)
    with pytest.raises(CaptureError, match=r"LOG|iterator"):
        add_tvm_dispatch(Model(act).eval(), torch.ones(3))
    assert before == LOG


def _ordered() -> float:
    ORDERED["c"] = 3
    ORDERED.move_to_end("a")
    LOG.append(1)
    return 1.0


def test_an_ordered_dict_keeps_its_order() -> None:
    _refused(_ordered)
    assert list(ORDERED.items()) == [("a", 1), ("b", 2)]


def _imports() -> float:
    if "colorsys" not in sys.modules:
        import colorsys  # noqa: F401
    LOG.append(1)
    return 1.0


def test_an_import_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    _refused(_imports)
    assert "colorsys" in sys.modules


@pytest.mark.parametrize("act", [lambda: SCHEDULE.value, lambda: 3.0 + TRACKER.enabled])
def test_an_iterator_that_is_not_used_is_no_reason(act: Callable[[], float]) -> None:
    x = torch.ones(3)
    module = add_tvm_dispatch(Model(act).eval(), x)
    torch.testing.assert_close(module(x), Model(act)(x))
    assert not dispatch_report(module).fallbacks
    SCHEDULE.value, TRACKER.enabled = 5.0, True
    try:
        torch.testing.assert_close(module(x), Model(act)(x))
    finally:
        SCHEDULE.value, TRACKER.enabled = 2.0, False


def _hits() -> float:
    try:
        return TRACKER.hit()
    except Exception:
        return 0.0


def test_an_iterator_that_is_used_is_refused_also_if_forward_catches_errors() -> None:
    _refused(_hits)
    _refused(lambda: next(SCHEDULE) + (LOG.append(1) or 0.0))
    assert TRACKER.hit() == 0
    TRACKER.numbers = itertools.count()
    assert SCHEDULE.value == 2


class Slotted:
    __slots__ = ("a", "b")


class Plain:
    def __init__(self) -> None:
        self.a = 1


def _on_entries(held: Any, key: Any, value: Any) -> None:
    held[key] = value


def _on_attributes(held: Any, key: Any, value: Any) -> None:
    setattr(held, str(key), value)


def _slotted() -> Slotted:
    made = Slotted()
    made.a = 1
    return made


KINDS: dict[str, tuple[Callable[[], Any], Callable[..., None], Callable[[Any], Any]]] = {
    "dict": (lambda: {"a": 1}, _on_entries, dict),
    "OrderedDict": (lambda: OrderedDict(a=1), _on_entries, dict),
    "object": (Plain, _on_attributes, lambda held: dict(vars(held))),
    "list": (lambda: [1], lambda held, _, value: held.append(value), list),
    "deque": (lambda: deque([1]), lambda held, _, value: held.append(value), list),
    "set": (lambda: {1}, lambda held, _, value: held.add(value), set),
}


def _failing(body: Callable[[Undo], None]) -> None:
    """Run ``body`` in a context that an exception leaves."""

    def run() -> None:
        with undone_if_refused() as undo:
            body(undo)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()


@pytest.mark.parametrize("kind", KINDS)
def test_changes_of_other_code_stay(kind: str) -> None:
    make, change, read = KINDS[kind]
    held, alone = make(), make()

    def body(undo: Undo) -> None:
        undo.note_contents([held])
        with undo.run():
            change(held, "b", "first run")
        change(held, "d", "between")
        with undo.run(), undo.run():
            change(held, "c", "second run")
        change(held, "e", "after")

    _failing(body)
    for key, value in (("d", "between"), ("e", "after")):
        change(alone, key, value)
    assert read(held) == read(alone)


def _unchanged(held: Any) -> Any:
    return held.qsize() if isinstance(held, queue.SimpleQueue) else held


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: bytearray(b"a"), lambda held: held.extend(b"b")),
        (lambda: array.array("d", [1.0]), lambda held: held.append(2.0)),
        (lambda: numpy.array([1.0, numpy.nan]), lambda held: held.fill(2)),
        (lambda: numpy.array(["a", None], dtype=object), lambda held: held.fill("c")),
        (queue.SimpleQueue, lambda held: held.put(1)),
        (_slotted, lambda held: setattr(held, "b", 2)),
        (lambda: os.environ, lambda held: held.update(TEST_UNDO="1")),
    ],
)
def test_contents_are_restored(make: Callable[[], Any], change: Callable[[Any], Any]) -> None:
    held = make()

    def body(undo: Undo) -> None:
        undo.note_contents(held)
        with undo.run():
            change(held)

    _failing(body)
    assert "TEST_UNDO" not in os.environ
    assert not hasattr(held, "b")
    if isinstance(held, numpy.ndarray):
        numpy.testing.assert_array_equal(held, make())
    elif not isinstance(held, Slotted):
        assert _unchanged(held) == _unchanged(make())


def test_an_inner_refusal_leaves_the_outer_record() -> None:
    held = [1]

    def grow(undo: Undo) -> None:
        undo.note_contents(held)
        with undo.run():
            held.append(len(held) + 1)

    def body(undo: Undo) -> None:
        undo.note_contents(held)
        with undone_if_refused() as inner:
            grow(inner)
        _failing(grow)
        assert held == [1, 2]

    _failing(body)
    assert held == [1]


def test_what_cannot_be_restored_does_not_prevent_other_restores() -> None:
    pinned, held, views = bytearray(b"a"), [1], []

    def body(undo: Undo) -> None:
        undo.note_contents([pinned, held])
        with undo.run():
            pinned.extend(b"b")
            held.append(2)
        views.append(memoryview(pinned))

    _failing(body)
    assert held == [1]


def test_no_dead_reference_comes_back() -> None:
    kept, gone, held = Plain(), Plain(), {}
    contents = {"kept": weakref.ref(kept), "gone": weakref.ref(gone)}
    del gone
    write(held, {}, contents)
    assert list(held) == ["kept"]
