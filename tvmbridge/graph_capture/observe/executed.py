"""Executed: which functions of users run while forward is observed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from tvmbridge.core.libraries import KEEPS_BOOKS
from tvmbridge.graph_capture.observe.names import Names, names_of
from tvmbridge.graph_capture.trace.callers import calling_python_module
from tvmbridge.graph_capture.trace.own_calls import OwnCalls

# Of these nothing is read that is not watched, or that may change what is computed.
_LIBRARIES = frozenset({"functorch", "mpmath", "numpy", "sympy", "torch", "torchgen", "triton"})
_LIBRARIES |= {"tvm", "tvmbridge"}
_IMPORTING = "<frozen importlib._bootstrap>"


@dataclass(frozen=True)
class Executed:
    """A function that ran: its code, its globals, and its free variables by name."""

    code: CodeType
    globals: dict[str, Any] = field(repr=False)
    free: Mapping[str, Any]

    @property
    def names(self) -> Names:
        """The names in its code."""
        return names_of(self.code)


@contextmanager
def executed_functions(note: Callable[[Executed], None], own: OwnCalls) -> Iterator[None]:
    """Within it ``note`` gets each function that runs in this thread, before its first run.

    Those of PyTorch, Python's library and the bridge are left out, and what runs while something is
    imported: it does not run again. ``own`` notes builtin functions and those of libraries. A
    profiler rests meanwhile.
    """
    known: dict[tuple[int, ...], CodeType] = {}
    before = _imports_under_way(sys._getframe())

    def called(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "c_call":
            own.note_builtin(argument)
        if event != "call" or (id(code),) in known:
            return
        if is_library(frame.f_globals.get("__name__")) or code.co_filename.startswith("<frozen"):
            known[(id(code),)] = code
            own.note_library(frame)
            return
        values = frame.f_locals if code.co_freevars else {}
        free = {name: values[name] for name in code.co_freevars if name in values}
        key = (id(code), *map(id, free.values()))
        if key not in known and _imports_under_way(frame) == before:
            known[key] = code
            note(Executed(code, frame.f_globals, free))

    with _profiled(called):
        yield


def _imports_under_way(frame: FrameType | None) -> int:
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename == _IMPORTING
        frame = frame.f_back
    return count


def is_called_by_library(depth: int, passing: str = "") -> bool:
    """Whether the function ``depth`` calls above the one that asks is none of users.

    Functions called ``passing`` are not counted.
    """
    caller = calling_python_module(depth + 1, passing)
    return caller is None or is_library(caller)


def is_library(name: Any) -> bool:
    """Whether nothing is read of the Python module of this ``name``, as above."""
    top = str(name).partition(".")[0]
    if top in _LIBRARIES or top in sys.stdlib_module_names:
        return True
    return str(name).startswith(KEEPS_BOOKS)


@contextmanager
def _profiled(function: Callable[[FrameType, str, object], None]) -> Iterator[None]:
    """Within it ``function`` is the profiler of this thread; one that runs is stopped."""
    before: Any = sys.getprofile()
    if hasattr(before, "disable"):  # that of cProfile, which is no function
        before.disable()
    sys.setprofile(function)
    try:
        yield
    finally:
        sys.setprofile(before if callable(before) else None)
        if hasattr(before, "enable"):
            before.enable()
