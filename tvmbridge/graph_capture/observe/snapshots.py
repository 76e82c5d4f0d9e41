"""Snapshots of contents: read them, merge changes of two sides, and write them back.

A snapshot is a dict (entries, attributes, or the items of a set), a list (items), or another value
that is compared as a whole. It has the same objects, not copies of them.
"""

from __future__ import annotations

import array
import contextvars
import operator
import os
import queue
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy

from tvmbridge.core.contents import MISSING, same_array, slots_of
from tvmbridge.graph_capture.observe.data import is_object, is_plain_class


def snapshot(value: Any) -> Any:
    """Return the contents of ``value``; None if it has no contents that can be assigned."""
    if value is os.environ:
        return dict(os.environ._data)
    if isinstance(value, contextvars.ContextVar):
        set_to = value.get(MISSING)
        return None if set_to is MISSING else [set_to]
    if isinstance(value, OrderedDict):  # Its order is not the order of the dict.
        return dict(OrderedDict.items(value))
    if isinstance(value, dict):
        return dict.copy(value)
    if isinstance(value, list):
        return list.copy(value)
    if isinstance(value, set):
        return dict.fromkeys(value)
    if isinstance(value, deque):
        return list(deque.__iter__(value))
    if isinstance(value, bytearray | array.array):
        return bytes(value)
    if isinstance(value, numpy.ndarray):
        return value.copy() if value.flags.writeable else None
    if isinstance(value, queue.SimpleQueue):
        return value.qsize()
    return _attributes(value) if has_attributes(value) else None


def has_attributes(value: Any) -> bool:
    """Whether the attributes of ``value`` are its contents."""
    return isinstance(value, queue.Queue) or (is_object(value) and is_plain_class(type(value)))


def _attributes(value: Any) -> dict[str, Any]:
    slots = {name: getattr(value, name, MISSING) for name in slots_of(type(value))}  # type: ignore[arg-type]
    held = {name: each for name, each in slots.items() if each is not MISSING}
    return {**held, **getattr(value, "__dict__", {})}


def same_snapshot(a: Any, b: Any) -> bool:
    """Whether two snapshots have the same objects in the same order."""
    if a is b:
        return True
    if isinstance(a, dict):
        values = map(operator.is_, a.values(), b.values())
        return len(a) == len(b) and all(map(operator.is_, a, b)) and all(values)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(operator.is_, a, b))
    if isinstance(a, numpy.ndarray):
        return same_array(a, b)
    return bool(a == b)


def without_own(before: Any, after: Any, now: Any) -> Any:
    """Return the contents that there would be without the changes from ``before`` to ``after``.

    Changes from ``after`` to ``now`` are of other threads, and stay.
    """
    if same_snapshot(after, before):
        return now
    if same_snapshot(now, after):
        return before
    if isinstance(now, dict):
        return _without_own_entries(before, after, now)
    if isinstance(now, list) and same_snapshot(now[: len(after)], after):
        return [*before, *now[len(after) :]]
    return now


def _without_own_entries(
    before: dict[Any, Any], after: dict[Any, Any], now: dict[Any, Any]
) -> dict[Any, Any]:
    found = {}
    for key in {**before, **now}:
        then, left, entry = (held.get(key, MISSING) for held in (before, after, now))
        kept = then if entry is left else entry
        if kept is not MISSING:
            found[key] = kept
    return found


def write(value: Any, now: Any, contents: Any) -> None:
    """Give ``value``, whose snapshot is ``now``, the contents of another snapshot."""
    if value is os.environ:
        _write_variables(now, contents)
    elif isinstance(value, contextvars.ContextVar):
        value.set(contents[0])
    elif isinstance(value, dict):
        _write_entries(value, now, contents)
    elif isinstance(value, list):
        list.__setitem__(value, slice(None), contents)
    elif isinstance(value, set):
        set.difference_update(value, [item for item in now if item not in contents])
        set.update(value, contents)
    elif isinstance(value, deque):
        deque.clear(value)
        deque.extend(value, contents)
    elif isinstance(value, bytearray | array.array):
        _write_bytes(value, contents)
    elif isinstance(value, numpy.ndarray):
        value[...] = contents
    elif isinstance(value, queue.SimpleQueue):
        _shorten(value, contents)
    else:
        _write_attributes(value, now, contents)


def _write_variables(now: dict[Any, Any], contents: dict[Any, Any]) -> None:
    """Change ``os.environ``, and with it the variables that C code reads."""
    key, entry = os.environ.decodekey, os.environ.decodevalue
    for name in now.keys() - contents.keys():
        del os.environ[key(name)]
    changed = {key(n): entry(v) for n, v in contents.items() if now.get(n) != v}
    os.environ.update(changed)


def _write_entries(value: Any, now: dict[Any, Any], contents: dict[Any, Any]) -> None:
    # OrderedDict has an order of its own, which methods of dict do not change.
    kind: type[dict[Any, Any]] = OrderedDict if isinstance(value, OrderedDict) else dict
    contents = {k: v for k, v in contents.items() if not (_is_dead(k) or _is_dead(v))}
    write_changes(now, contents, partial(kind.__setitem__, value), partial(kind.__delitem__, value))
    left = [key for key in now if key in contents]
    left += [key for key in contents if key not in now]
    if left != list(contents):  # A removed entry has come back at the end.
        kind.clear(value)
        kind.update(value, contents)


def write_changes(
    now: dict[Any, Any],
    contents: dict[Any, Any],
    assign: Callable[[Any, Any], object],
    remove: Callable[[Any], object],
) -> None:
    """Turn ``now`` into ``contents``: assign entries that differ, and remove further ones."""
    for key in now.keys() - contents.keys():
        remove(key)
    for key, entry in contents.items():
        if now.get(key, MISSING) is not entry:
            assign(key, entry)


def _is_dead(value: Any) -> bool:
    """Whether ``value`` is a weak reference whose object is gone, as in weak dicts."""
    return isinstance(value, weakref.ref) and value() is None


def _write_bytes(value: bytearray | array.array[Any], contents: bytes) -> None:
    if isinstance(value, bytearray):
        value[:] = contents
    else:
        value[:] = array.array(value.typecode, contents)


def _shorten(value: queue.SimpleQueue[Any], size: int) -> None:
    """Remove the items that were added to a queue; items that were taken stay away."""
    items = [value.get_nowait() for _ in range(value.qsize())] if value.qsize() > size else []
    for item in items[:size]:
        value.put(item)


def _write_attributes(value: Any, now: dict[str, Any], contents: dict[str, Any]) -> None:
    """Set and remove attributes that differ, past a ``__setattr__`` of the class."""
    slots, held = slots_of(type(value)), getattr(value, "__dict__", {})  # type: ignore[arg-type]

    def assign(name: str, attribute: Any) -> None:
        if name in slots:
            object.__setattr__(value, name, attribute)
        else:
            held[name] = attribute

    def remove(name: str) -> None:
        object.__delattr__(value, name) if name in slots else held.pop(name)

    write_changes(now, contents, assign, remove)
