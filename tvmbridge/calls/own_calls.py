"""Own calls: whether forward's own thread used a generator, or set a setting of the process.

All threads share PyTorch's generator, those of Python and numpy, and most of PyTorch's settings. A
change of these is an effect of forward if no other thread ran, or if forward's thread called
something that makes such a change.
"""

from __future__ import annotations

import builtins
import datetime
import gc
import inspect
import os
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FrameType
from typing import Any

import numpy
import torch

# The names of builtin functions that set what all threads share begin so; fake tensors call others.
_SETTERS = (
    "_set_cublas",
    "_set_cudnn",
    "_set_default_dtype",
    "_set_deterministic",
    "_set_float32",
    "_set_fp32",
    "_set_mkldnn",
    "_set_onednn",
    "_set_sdp",
    "_set_warnAlways",
    "set_anomaly",
)
_CLOCKS = frozenset(
    {
        datetime.date.today,
        datetime.datetime.now,
        datetime.datetime.today,
        datetime.datetime.utcnow,
        time.monotonic,
        time.monotonic_ns,
        time.perf_counter,
        time.perf_counter_ns,
        time.process_time,
        time.process_time_ns,
        time.thread_time,
        time.thread_time_ns,
        time.time,
        time.time_ns,
    }
)
_FILES = frozenset(
    {
        builtins.open,
        os.access,
        os.getcwd,
        os.getcwdb,
        os.listdir,
        os.lstat,
        os.open,
        os.readlink,
        os.scandir,
        os.stat,
        os.statvfs,
    }
)
_COLLECTOR = frozenset({gc.get_count, gc.get_stats, gc.get_threshold, gc.isenabled})
_QUESTIONS: dict[Any, str] = {
    **dict.fromkeys(_CLOCKS, "asks for the time by"),
    **dict.fromkeys(_FILES, "looks at files or folders by"),
    # A trace puts garbage collection off.
    **dict.fromkeys(_COLLECTOR, "asks for garbage collection by"),
    print: "writes text by",
}
_CONTAINERS = frozenset({bytes, deque, dict, list, set, str, tuple, type})
_PYTHON_SETTERS = ("_set_", "set_")
_GENERATOR = (
    (random.random.__self__, "random"),  # type: ignore[attr-defined]
    (numpy.random.rand.__self__, "numpy.random"),  # type: ignore[attr-defined]
    (torch.default_generator, "torch"),
)

_THREAD = threading.local()


def is_question(function: Any) -> bool:
    """Whether a builtin function reads the time, files or garbage collection, or prints."""
    return function in _QUESTIONS


# Classes of threads that wait for seconds and touch neither generators nor settings.
_HARMLESS_THREADS = ("TMonitor",)  # tqdm's


def _other_threads() -> dict[int, tuple[FrameType, int]]:
    """Return the innermost frame of each other thread of Python, and its last instruction."""
    left_out = {t.ident for t in threading.enumerate() if type(t).__name__ in _HARMLESS_THREADS}
    left_out.add(threading.get_ident())
    frames = sys._current_frames()
    return {ident: (f, f.f_lasti) for ident, f in frames.items() if ident not in left_out}


class OwnCalls:
    """What forward's thread called while forward ran.

    Attributes:
        generators: the modules whose global generator it may have used: torch, random or
            numpy.random.
        sets: whether it called a setter of PyTorch's.
        sets_filters: whether user code changed Python's filters of warnings.
        questions: what user code asked of the process, with the function, such as "asks for the
            time by monotonic".
    """

    def __init__(self) -> None:
        self.generators: set[str] = set()
        self.sets = False
        self.sets_filters = False
        self.questions: dict[str, None] = {}
        self._others = _other_threads()

    def note_builtin(self, function: Any) -> None:
        """Note a builtin function that is called."""
        owner = getattr(function, "__self__", None)
        if type(owner) in _CONTAINERS or owner is builtins:  # nearly all calls
            return
        self.note_value(function)
        if getattr(function, "__name__", "").startswith(_SETTERS):
            self._note_setter()

    def note_question(self, function: Any) -> None:
        """Note a builtin function of :func:`is_question` that user code calls."""
        self.questions[f"{_QUESTIONS[function]} {function.__qualname__}"] = None

    def note_library(self, frame: FrameType) -> None:
        """Note a function of a library that is called."""
        in_backends = str(frame.f_globals.get("__name__")).startswith("torch.backends")
        if in_backends and frame.f_code.co_name.startswith(_PYTHON_SETTERS):
            self._note_setter()

    def note_value(self, value: Any) -> None:
        """Note a value that forward's functions name, or a function that is called.

        The methods of numpy's generators are no builtin functions, so that calls are not seen.
        """
        kind = type(value)
        # Of other values, asking for an attribute may run code of the user's.
        bound = kind is BuiltinFunctionType or inspect.getattr_static(kind, "__self__", None)
        owner = None if bound is None else value.__self__
        for generator, name in _GENERATOR:
            if owner is generator or value is generator:
                for calls in (self, *_around()):
                    calls.generators.add(name)

    def _note_setter(self) -> None:
        for calls in (self, *_around()):
            calls.sets = True

    def may_draw_from(self, name: str) -> bool:
        """Whether a change of this generator may be forward's."""
        return name in self.generators or self.is_alone()

    def may_set(self) -> bool:
        """Whether a change of a setting of the process may be forward's."""
        return self.sets or self.is_alone()

    def is_alone(self) -> bool:
        """Whether no other thread has run Python since this object was created.

        A thread that waits in one call all the time stays in the same frame.
        """
        return self._others == _other_threads()


@contextmanager
def all_own_calls() -> Iterator[OwnCalls]:
    """Yields what forward's thread calls in all the runs within it that are watched."""
    around = OwnCalls()
    _around().append(around)
    try:
        yield around
    finally:
        _around().remove(around)


def _around() -> list[OwnCalls]:
    around: list[OwnCalls] = _THREAD.__dict__.setdefault("around", [])
    return around
