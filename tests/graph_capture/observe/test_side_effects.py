"""Side effects of forward outside the module are refused by name."""

from __future__ import annotations

import array
import collections
import datetime
import gc
import itertools
import os
import pathlib
import queue
import random
import secrets
import threading
import time
import types
import uuid
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tvmbridge import CaptureError, add_tvm_dispatch, dispatch_report

QUEUE: queue.Queue[int] = queue.Queue()
SIMPLE: queue.SimpleQueue[int] = queue.SimpleQueue()
DEQUE: collections.deque[int] = collections.deque()
ARRAY = array.array("i", [0])
BYTES = bytearray(1)
LOCAL = threading.local()
LOCAL.calls = 0
SPACE = types.ModuleType("space_of_a_test")
SPACE.calls = 0  # type: ignore[attr-defined]
NUMBERS = [itertools.count()]


class Meter:
    def __init__(self) -> None:
        self.calls = 0

    def update(self) -> None:
        self.calls += 1


METERS = [Meter()]


class Model(nn.Module):
    def __init__(self, act: Callable[[Model, torch.Tensor], Any]) -> None:
        super().__init__()
        self.act = act
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = self.act(self, x)
        return x * self.weight * (number if isinstance(number, float) else 2.0)


def _counting(*_: Any) -> None:
    _counting.calls += 1  # type: ignore[attr-defined]


_counting.calls = 0  # type: ignore[attr-defined]


def _in_module(*_: Any) -> None:
    SPACE.calls += 1  # type: ignore[attr-defined]


def _in_thread(*_: Any) -> None:
    LOCAL.calls += 1


def _in_array(*_: Any) -> None:
    ARRAY[0] += 1


def _in_bytes(*_: Any) -> None:
    BYTES[0] += 1


def _in_globals(*_: Any) -> None:
    globals()["MADE"] = globals().get("MADE", 0) + 1


def _in_default(_: Any, x: torch.Tensor, seen: list[int] = []) -> None:  # noqa: B006
    seen.append(1)


def _tagging(model: Model, _: torch.Tensor) -> None:
    model.weight.calls = 1  # type: ignore[attr-defined]


EFFECTS: dict[str, tuple[Callable[..., Any], str]] = {
    "function": (_counting, r"changes _counting\.calls outside"),
    "module": (_in_module, r"changes SPACE\.calls outside"),
    "thread": (_in_thread, r"changes LOCAL\.calls outside"),
    "queue": (lambda *_: QUEUE.put(1), "changes QUEUE outside"),
    "simple queue": (lambda *_: SIMPLE.put(1), "changes SIMPLE outside"),
    "deque": (lambda *_: DEQUE.append(1), "changes DEQUE outside"),
    "array": (_in_array, "changes ARRAY outside"),
    "bytes": (_in_bytes, "changes BYTES outside"),
    "globals": (_in_globals, r"searches its own globals by globals"),
    "default": (_in_default, "changes a default of _in_default outside"),
    "meters": (lambda *_: METERS[0].update(), "changes METERS outside"),
    "iterator": (lambda *_: float(next(NUMBERS[0])), "reads the iterator NUMBERS"),
    "attribute": (_tagging, "sets attributes of a tensor"),
    "urandom": (lambda *_: float(os.urandom(1)[0]), "random numbers from the system"),
    "uuid": (lambda *_: float(uuid.uuid4().int % 7), "random numbers from the system"),
    "secrets": (lambda *_: float(secrets.randbelow(9)), "random numbers from the system"),
    "system": (lambda *_: random.SystemRandom().random(), "random numbers from the system"),
    "time": (lambda *_: time.perf_counter(), r"asks for the time by perf_counter"),
    "file": (lambda *_: float(os.path.exists("x")), r"looks at files or folders by stat"),
    "path": (lambda *_: float(pathlib.Path("x").exists()), r"looks at files or folders by stat"),
    "content": (lambda *_: len(pathlib.Path(__file__).read_bytes()), r"looks at .* by open"),
    "folder": (lambda *_: float(len(os.path.abspath("x"))), r"looks at files .* by getcwd"),
    "collection": (lambda *_: float(gc.isenabled()), r"asks for garbage collection by isenabled"),
    "date": (lambda *_: datetime.datetime.now().timestamp(), r"the time by datetime\.now"),
    "numpy": (lambda *_: numpy.random.default_rng().random(), "random numbers from the system"),
    "leaf": (lambda _, x: x.requires_grad_(), "changes requires_grad of a tensor"),
    "frozen": (lambda m, _: m.weight.requires_grad_(False), "changes requires_grad of a tensor"),
}


@pytest.mark.parametrize("effect", EFFECTS)
def test_an_effect_is_refused(effect: str) -> None:
    act, message = EFFECTS[effect]
    before = _state()
    with pytest.raises(CaptureError, match=message):
        add_tvm_dispatch(Model(act).eval(), torch.randn(3))
    assert _state() == before


def _state() -> list[Any]:
    """Return all that the effects change outside the module."""
    numbers = [_counting.calls, SPACE.calls, LOCAL.calls, METERS[0].calls]  # type: ignore[attr-defined]
    queues = [QUEUE.qsize(), QUEUE.unfinished_tasks, SIMPLE.qsize(), list(DEQUE)]
    names = sorted(globals())
    return [
        numbers,
        queues,
        list(ARRAY),
        bytes(BYTES),
        repr(NUMBERS),
        names,
        repr(_in_default.__defaults__),
    ]


def _toggling(module: Any, x: torch.Tensor) -> None:
    module.requires_grad_(False)
    module.weight.mean()
    module.requires_grad_(True)


def test_requires_grad_of_what_is_recorded_is_left_alone() -> None:
    with pytest.raises(CaptureError, match="changes requires_grad of a tensor"):
        add_tvm_dispatch(Model(_toggling).train(), torch.randn(3, requires_grad=True))


def _detaching(_: Any, x: torch.Tensor) -> None:
    x.detach_()


def test_detaching_an_argument_is_refused() -> None:
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(CaptureError, match="changes requires_grad of a tensor"):
        add_tvm_dispatch(Model(_detaching).train(), x)


def test_numbers_of_a_seed_that_forward_gives_are_served() -> None:
    plain = Model(lambda *_: numpy.random.default_rng(3).random()).eval()
    module = add_tvm_dispatch(Model(plain.act).eval(), torch.ones(3))
    torch.testing.assert_close(module(torch.ones(3)), plain(torch.ones(3)))
    assert not dispatch_report(module).fallbacks
