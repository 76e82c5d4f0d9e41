"""Frozen: find functions that ``gc.freeze()`` hides from ``gc.get_referrers``.

Objects still report what they refer to. So the search begins at the user's Python modules and at
the frames that run now, and follows references. The collector's state stays as it is.
"""

from __future__ import annotations

import gc
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from tvmbridge.graph_capture.observe.executed import is_library

# A search over this many objects takes about two seconds.
_MOST_OBJECTS = 2**21


def reachable_functions(known: Iterable[Any]) -> Iterator[types.FunctionType]:
    """Yield the functions that ``known``, the user's modules and the running frames lead to.

    The search passes by the Python modules and the classes of libraries.
    """
    modules = [m for name, m in list(sys.modules.items()) if not is_library(name)]
    # The nearest come first: a module holds most functions of forward a few references away.
    waiting, passed = deque([*known, *map(_names_of, modules), *_frames()]), set[int]()
    while waiting and len(passed) < _MOST_OBJECTS:
        value = waiting.popleft()
        if id(value) in passed or not gc.is_tracked(value) or _is_of_library(value):
            continue
        passed.add(id(value))
        waiting += gc.get_referents(value)
        if type(value) is types.FunctionType:
            yield value


def _names_of(module: Any) -> Any:
    return getattr(module, "__dict__", module)


def _frames() -> Iterator[dict[str, Any]]:
    """Yield the variables of the frames of all threads, innermost first."""
    for innermost in sys._current_frames().values():
        frame: types.FrameType | None = innermost
        while frame is not None:
            if not is_library(frame.f_globals.get("__name__")):
                yield frame.f_locals
            frame = frame.f_back


def _is_of_library(value: Any) -> bool:
    # Not isinstance: it reads ``__class__``, which may run code of the user's.
    kind = type(value)
    if issubclass(kind, types.ModuleType):
        return is_library(value.__dict__.get("__name__"))
    return issubclass(kind, type) and is_library(value.__dict__.get("__module__"))
