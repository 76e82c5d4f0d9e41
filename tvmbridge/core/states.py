"""States: read what objects of Python's standard library hold behind methods.

No attribute of a lock, a logger or a shared counter shows its state, or a copy is the object
itself. A guard compares what the methods of such an object return.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple


class Reader(NamedTuple):
    """How the state of the objects of a class is read.

    - ``read``: returns the state of an object.
    - ``names``: forward can depend on the state only if its code has one of these names; None:
      the state always counts.
    """

    read: Callable[[Any], list[Any]]
    names: frozenset[str] | None = None


def _logger(value: Any) -> list[Any]:
    handlers = [type(handler).__qualname__ for handler in value.handlers]
    switches = [value.level, value.disabled, value.propagate, value.manager.disable]
    return [*switches, value.getEffectiveLevel(), value.hasHandlers(), handlers]


def _loggers(value: Any) -> list[Any]:
    known = [value.root, *value.loggerDict.values()]
    levels = [(e.name, e.level, e.disabled) for e in known if isinstance(e, logging.Logger)]
    # Without the loggers that somebody asked for and left as they were: more may come at any time.
    return [value.disable, *(each for each in levels if each[1] or each[2])]


def _bytes(value: Any) -> list[Any]:
    view = memoryview(value)
    return [view.format, view.shape, view.tobytes()]


def _variable(value: Any) -> list[Any]:
    try:
        return [value.get()]
    except LookupError:  # it has neither a value nor a default
        return []


def _stream(value: Any) -> list[Any]:
    return ["closed"] if value.closed else [value.tell(), value.getvalue()]


def referent(value: Any) -> Any:
    """Return what a weak reference or proxy refers to; None if that is gone."""
    if issubclass(type(value), weakref.ReferenceType):
        return value()
    try:  # A proxy passes all attributes on to the object that it refers to.
        return value.__mro__[0] if isinstance(value, type) else value.__init__.__self__
    except ReferenceError:
        return None


def is_weak(value: Any) -> bool:
    """Whether ``value`` is a weak reference or proxy."""
    return issubclass(type(value), (weakref.ReferenceType, *weakref.ProxyTypes))


def state_of_context(value: Any) -> list[Any]:
    """Return what results of decimals depend on; arithmetic writes the flags of a context."""
    limits = [value.Emin, value.Emax, value.capitals, value.clamp]
    return [value.prec, value.rounding, *limits, repr(value.traps)]


def _contents(value: Any) -> list[Any]:
    return [dict(value.items())]


_OF_LOGGERS = frozenset({"disabled", "getEffectiveLevel", "handlers", "hasHandlers", "level"})
_OF_LOGGERS |= {"isEnabledFor", "manager", "parent", "propagate", "root"}
_LOCKED = Reader(lambda lock: [lock.locked()], frozenset({"locked"}))
_BYTES = Reader(_bytes)
_SET = Reader(lambda event: [event.is_set()])
_HELD = Reader(lambda value: [value.data])
_ITEMS = Reader(list)
# By the full name of a class, so that none of these modules is imported for it.
_READERS = {
    "_ctypes.Array": _BYTES,
    "_ctypes.Structure": _BYTES,
    "_ctypes.Union": _BYTES,
    "_ctypes._SimpleCData": _BYTES,
    "_contextvars.ContextVar": Reader(_variable),
    "_io.BytesIO": Reader(_stream),
    "_io.StringIO": Reader(_stream),
    "_thread._local": Reader(lambda value: [dict(vars(value))]),
    "_thread.lock": _LOCKED,
    "_weakrefset.WeakSet": _ITEMS,
    "builtins.mappingproxy": Reader(_contents),
    "builtins.memoryview": _BYTES,
    "collections.UserList": _HELD,
    "collections.UserString": _HELD,
    "decimal.Context": Reader(state_of_context),
    "logging.Logger": Reader(_logger, _OF_LOGGERS),
    "logging.Manager": Reader(_loggers, _OF_LOGGERS),
    "logging.LoggerAdapter": Reader(lambda value: [value.logger], _OF_LOGGERS),
    "mmap.mmap": _BYTES,
    "multiprocessing.sharedctypes.SynchronizedBase": Reader(lambda value: [value.get_obj()]),
    "multiprocessing.synchronize.Event": _SET,
    "multiprocessing.synchronize.Semaphore": Reader(lambda value: [value.get_value()]),
    "threading.Event": _SET,
    "threading.Semaphore": Reader(lambda value: [value._value], frozenset({"_value"})),
    "weakref.CallableProxyType": Reader(lambda value: [referent(value)]),
    "weakref.ProxyType": Reader(lambda value: [referent(value)]),
    "weakref.ReferenceType": Reader(lambda value: [referent(value)]),
    "weakref.WeakKeyDictionary": Reader(_contents),
    "weakref.WeakValueDictionary": Reader(_contents),
}


def reader_of(kind: type[Any]) -> Reader | None:
    """Return how the state of the objects of ``kind`` is read; None if attributes show it."""
    return _found(kind)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4096)
def _found(kind: type[Any]) -> Reader | None:
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    found = next((_READERS[name] for name in names if name in _READERS), None)
    if found is None or kind.__module__.partition(".")[0] in sys.stdlib_module_names:
        return found
    if not kind.__dictoffset__:
        return found
    read = found.read  # An object of a user's class may have attributes as well.
    return Reader(lambda value: [*read(value), dict(vars(value))], found.names)


@dataclass(frozen=True)
class StateOf:
    """The expected state of an object that is compared by what its methods return.

    - ``kind``: the class of the object.
    - ``state``: the expected state; its parts may be expected values themselves. None: any state.

    Example: an event that nobody has set: ``StateOf(threading.Event, [False])``.
    """

    kind: type[Any]
    state: list[Any] | None

    def now(self, value: Any) -> list[Any] | None:
        """Return the present state of ``value``; None if it has none or another class."""
        found = reader_of(self.kind) if type(value) is self.kind else None
        try:
            return None if found is None else found.read(value)
        except Exception:  # closed, released, or changed by another thread meanwhile
            return None

    def counts(self, names: Collection[str]) -> bool:
        """Whether code that has these ``names`` can depend on the state."""
        found = reader_of(self.kind)
        return found is None or found.names is None or not found.names.isdisjoint(names)
