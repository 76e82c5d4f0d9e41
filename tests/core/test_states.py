"""Objects of Python's standard library that show their state by methods alone.

Forward branches on such an object. Served calls must follow eager PyTorch after each change.
"""

from __future__ import annotations

import collections
import contextvars
import ctypes
import io
import logging
import multiprocessing
import random
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.core.contents import same_value, state_of
from tvmbridge.core.errors import NotApartError
from tvmbridge.core.states import reader_of, referent
from tvmbridge.graph_capture.observe.objects import NO_READS
from tvmbridge.graph_capture.observe.staging import staged
from tvmbridge.runtime.guards.values import ValueGuard


class Case(NamedTuple):
    """An object, what forward asks of it, and a change of the answer."""

    make: Callable[[], Any]
    ask: Callable[[Any], Any]
    change: Callable[[Any], Any]


class Settings:
    """A plain object that a weak reference refers to."""

    def __init__(self) -> None:
        self.on, self.unread = False, 0


SETTINGS = Settings()
ITEMS = {"on": False}


def _local() -> threading.local:
    held = threading.local()
    held.on = False
    return held


def _adapter() -> Any:
    return logging.LoggerAdapter(logging.getLogger("tests.states.adapter"), {})


CASES = {
    "logger": Case(
        lambda: logging.getLogger("tests.states.own"),
        lambda log: log.isEnabledFor(logging.DEBUG),
        lambda log: log.setLevel(logging.DEBUG),
    ),
    "logger's parent": Case(
        lambda: logging.getLogger("tests.states.outer.inner"),
        lambda log: log.getEffectiveLevel() == logging.DEBUG,
        lambda log: log.parent.setLevel(logging.DEBUG),
    ),
    "handlers": Case(
        lambda: logging.getLogger("tests.states.handled"),
        lambda log: bool(log.handlers),
        lambda log: log.addHandler(logging.NullHandler()),
    ),
    "adapter": Case(
        _adapter,
        lambda log: log.isEnabledFor(logging.DEBUG),
        lambda log: log.logger.setLevel(logging.DEBUG),
    ),
    "event": Case(threading.Event, lambda e: e.is_set(), lambda e: e.set()),
    "lock": Case(threading.Lock, lambda lock: lock.locked(), lambda lock: lock.acquire()),
    "thread-local": Case(_local, lambda o: o.on, lambda o: setattr(o, "on", True)),
    "context variable": Case(
        lambda: contextvars.ContextVar("on", default=False), lambda v: v.get(), lambda v: v.set(1)
    ),
    "shared number": Case(
        lambda: multiprocessing.Value("i", 0), lambda v: v.value, lambda v: setattr(v, "value", 1)
    ),
    "number of C": Case(
        lambda: ctypes.c_int(0), lambda v: v.value, lambda v: setattr(v, "value", 1)
    ),
    "memory": Case(lambda: memoryview(bytearray(2)), lambda v: v[0], lambda v: v.__setitem__(0, 1)),
    "view of a dict": Case(
        lambda: types.MappingProxyType(ITEMS), lambda v: v["on"], lambda v: ITEMS.update(on=True)
    ),
    "list of a user": Case(
        lambda: collections.UserList([0]), lambda v: v[0], lambda v: v.__setitem__(0, 1)
    ),
    "text": Case(lambda: io.StringIO(), lambda s: bool(s.getvalue()), lambda s: s.write("on")),
    "weak reference": Case(
        lambda: weakref.ref(SETTINGS), lambda r: r().on, lambda r: setattr(r(), "on", True)
    ),
    "weak proxy": Case(
        lambda: weakref.proxy(SETTINGS), lambda p: p.on, lambda p: setattr(p, "on", True)
    ),
    "weak set": Case(weakref.WeakSet, len, lambda s: s.add(SETTINGS)),
    "generator": Case(
        lambda: random.Random(0), lambda r: r.getstate()[1][-1] != 624, lambda r: r.random()
    ),
    "masked array": Case(
        lambda: numpy.ma.array([1.0, 2.0], mask=[False, False]),
        lambda a: bool(a.mask[0]),
        lambda a: a.__setitem__(0, numpy.ma.masked),
    ),
}
_ASKED: Any = None


class OfGlobal(nn.Module):
    """Asks an object in a global."""

    def __init__(self, ask: Callable[[Any], Any], held: Any) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 5 if self.ask(_ASKED) else x * 3


class OfAttribute(OfGlobal):
    """Asks an object in an attribute."""

    def __init__(self, ask: Callable[[Any], Any], held: Any) -> None:
        super().__init__(ask, held)
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 5 if self.ask(self.held) else x * 3


@dataclass(slots=True)
class Slots:
    """An object that holds another one and has no ``__dict__``."""

    held: Any


class OfSlots(OfAttribute):
    """Asks an object in a slot of an object."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 5 if self.ask(self.held.held) else x * 3


# A stand-in of a module has a copy of its stream, which counts as an iterator, and is refused.
# copy.deepcopy puts a copy of the object in the place of a proxy, so calls run in eager PyTorch.
_PROXY = {"weak proxy"}
_IN_GLOBALS = {"text", *_PROXY}
# Thread-local objects in globals are compared by the names that the function itself has.
_IN_ATTRIBUTES = {"thread-local"}


def test_the_referent_of_a_weak_proxy_may_be_a_class_or_gone() -> None:
    proxy, gone = weakref.proxy(OfGlobal), weakref.proxy(nn.Identity())
    assert referent(proxy) is OfGlobal
    assert referent(gone) is None


def _made(case: Case, monkeypatch: pytest.MonkeyPatch) -> Any:
    SETTINGS.on = ITEMS["on"] = False
    held = case.make()
    if isinstance(held, logging.Logger | logging.LoggerAdapter):
        _reset_loggers()
    monkeypatch.setitem(globals(), "_ASKED", held)
    return held


def _guard(module: nn.Module) -> ValueGuard:
    """Return the guard of what forward reads, without compiled code."""
    arguments: Any = module, (torch.ones(3),), {}, False
    try:
        seen = staged(*arguments).observation
    except NotApartError:  # It holds a lock.
        seen = staged(*arguments, apart=False).observation
    assert seen is not None
    return ValueGuard.of(module, seen.values, seen.outside)


@pytest.mark.parametrize("name", CASES)
def test_a_guard_notices_the_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    ways = ((OfGlobal, _IN_ATTRIBUTES), (OfAttribute, _IN_GLOBALS), (OfSlots, _PROXY))
    for kind in [kind for kind, others in ways if name not in others]:
        held = _made(case, monkeypatch)
        module = kind(case.ask, Slots(held) if kind is OfSlots else held)
        guard = _guard(module)
        assert guard.changed() is None
        case.change(held)
        assert guard.changed() is not None, kind.__name__


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("logger", OfGlobal),
        ("event", OfAttribute),
        ("weak reference", OfSlots),
        ("weak proxy", OfGlobal),
    ],
)
def test_served_calls_follow_the_state(
    name: str, kind: type[OfGlobal], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, x = CASES[name], torch.ones(3)
    held = _made(case, monkeypatch)
    module = add_tvm_dispatch(kind(case.ask, Slots(held) if kind is OfSlots else held), x)
    for _ in range(2):
        assert module(x)[0] == 3
    assert dispatch_report(module).tvm_calls == 2
    case.change(held)
    for _ in range(2):
        assert module(x)[0] == 5


def test_slots_of_an_object_in_a_global(monkeypatch: pytest.MonkeyPatch) -> None:
    event = threading.Event()
    monkeypatch.setitem(globals(), "_ASKED", Slots(event))
    guard = _guard(OfGlobal(lambda slots: slots.held.is_set(), None))
    assert guard.changed() is None
    event.set()
    assert guard.changed() is not None


def _reset_loggers() -> None:
    for name, log in logging.Logger.manager.loggerDict.items():
        if name.startswith("tests.states") and isinstance(log, logging.Logger):
            log.setLevel(logging.NOTSET)
            log.handlers.clear()
    logging.getLogger("tests.states.outer").setLevel(logging.WARNING)


class Talking(nn.Module):
    """Writes messages, and asks nothing of its logger; holds a lock while it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.log, self.lock = logging.getLogger("tests.states.talking"), threading.Lock()
        self.settings, self.places = weakref.ref(SETTINGS), threading.Semaphore(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.debug("called")
        with self.lock, self.places:
            return x * 5 if self.settings().on else x * 3


def test_what_forward_does_not_ask_for_ends_no_service() -> None:
    SETTINGS.on = False
    module, x = add_tvm_dispatch(Talking(), torch.ones(3)), torch.ones(3)
    module.log.setLevel(logging.ERROR)
    SETTINGS.unread += 1
    with module.places:  # Another thread may be in forward.
        assert module(x)[0] == 3
    report = dispatch_report(module)
    assert (report.tvm_calls, dict(report.fallbacks)) == (1, {})


class Asking(nn.Module):
    """Asks a logger that it looks up at each call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        log = logging.getLogger("tests.states.looked_up")
        return x * 5 if log.isEnabledFor(logging.DEBUG) else x * 3


def test_a_logger_that_forward_looks_up() -> None:
    x, log = torch.ones(3), logging.getLogger("tests.states.looked_up")
    log.setLevel(logging.INFO)
    module = add_tvm_dispatch(Asking(), x)
    assert module(x)[0] == 3
    logging.getLogger("tests.states.new")  # A logger without a level changes nothing.
    assert module(x)[0] == 3
    assert dispatch_report(module).tvm_calls == 2
    log.setLevel(logging.DEBUG)
    assert module(x)[0] == 5


class Mine(collections.UserList):  # type: ignore[type-arg]
    """A user's class, with an attribute beside the state of its base class."""

    scale = 1


@pytest.mark.parametrize("change", [lambda m: m.append(1), lambda m: setattr(m, "scale", 2)])
def test_the_state_of_a_users_class_has_its_attributes(change: Callable[[Mine], None]) -> None:
    mine = Mine([0])
    assert reader_of(Mine) is not None
    assert state_of(mine)
    before = NO_READS.state(mine)
    assert same_value(mine, before)
    change(mine)
    assert not same_value(mine, before)


def test_a_stream_that_is_closed_has_changed() -> None:
    stream = memoryview(bytearray(2))
    before = NO_READS.state(stream)
    stream.release()
    assert not same_value(stream, before)


def test_what_a_proxy_refers_to() -> None:
    held = Mine([0])
    for value in (held, Mine, test_what_a_proxy_refers_to):
        assert referent(weakref.proxy(value)) is value
    proxy = weakref.proxy(held)
    del held
    assert referent(proxy) is None
