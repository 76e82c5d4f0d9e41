"""Snapshots: objects of Python's library that forward may fill, such as queues, before it ran."""

from __future__ import annotations

import contextvars
import functools
import io
import logging
import sys
import threading
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from tvmbridge.core.contents import CONTAINERS, all_held, same_held
from tvmbridge.graph_capture.observe.data import is_object
from tvmbridge.graph_capture.observe.executed import is_library
from tvmbridge.graph_capture.observe.sources import Place

# They hold nothing that forward could fill, or are looked at in another way.
_LEFT_OUT = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
    functools._lru_cache_wrapper,
    logging.Logger,
    threading.local,
    contextvars.ContextVar,
    weakref.ReferenceType,
)


class Snapshots:
    """What objects held when they were taken."""

    def __init__(self) -> None:
        self._taken: dict[int, tuple[Place, list[Any]]] = {}

    def take(self, passed: Sequence[Place]) -> None:
        """Note what the last of the places ``passed`` holds, if it is such an object."""
        *before, place = passed
        modules = [p.value for p in before if isinstance(p.value, types.ModuleType)]
        if any(is_library(module.__name__) for module in modules):
            return
        value = place.value
        if type(value).__module__.partition(".")[0] not in sys.stdlib_module_names:
            return
        if value is not sys.modules and not isinstance(value, _LEFT_OUT):
            self._taken.setdefault(id(value), (place, all_held(value)))

    def changed(self) -> Iterator[str]:
        """The names of those that hold something else now."""
        for place, held in self._taken.values():
            if not same_held(held, all_held(place.value)):
                yield place.label


def holds_iterator(value: Any) -> bool:
    """Whether ``value`` is an iterator, or a container or a user's object that holds one."""
    if isinstance(value, io.IOBase):
        return False
    if isinstance(value, Iterator):
        return True
    if not isinstance(value, CONTAINERS) and not is_object(value):
        return False
    return any(isinstance(h, Iterator) and not isinstance(h, io.IOBase) for h in all_held(value))
