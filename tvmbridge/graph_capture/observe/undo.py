"""Undo: restore what runs of forward changed outside the module, if the capture is refused.

A capture runs forward several times. In eager PyTorch these runs would not exist, so a counter in
a global, an entry of a list or an attribute of a class must have its old value after a refusal.
"""

from __future__ import annotations

import array
import contextvars
import os
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import nn

from tvmbridge.core.contents import CONTAINERS, MISSING, all_held, is_constant, same_value, slots_of
from tvmbridge.graph_capture.observe.data import is_data, is_object, is_plain_class
from tvmbridge.graph_capture.observe.executed import is_library
from tvmbridge.graph_capture.observe.sources import Source, names_added

_OWN_NAMES = ("_parameters", "_buffers", "_modules")


class Undo:
    """The values outside the module, as they were when a run of forward first met them."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, str], Source] = {}
        self._namespaces: dict[int, tuple[Source, frozenset[str]]] = {}
        # By id: the object, which the entry keeps alive, and the function that restores it.
        self._contents: dict[int, tuple[Any, Callable[[], None]]] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    def note_place(self, source: Source) -> None:
        """Record which object is at ``source``, and the contents of this object."""
        if self._places.setdefault(source.key, source) is source:
            self.note_contents(source.value)

    def note_namespace(self, source: Source) -> None:
        """Record the names that the namespace at ``source`` has."""
        self._namespaces.setdefault(id(source.value), (source, frozenset(vars(source.value))))

    def note_contents(self, value: Any) -> None:
        """Record the contents of the containers and plain objects in ``value``."""
        looked_into = isinstance(value, CONTAINERS) or is_data(value) or is_object(value)
        for held in all_held(value) if looked_into else [value]:
            if isinstance(held, torch.Tensor):
                self._tensors[id(held)] = held
            restore = None if id(held) in self._contents else _restoring(held)
            if restore is not None:
                self._contents[id(held)] = held, restore

    def note_names(self, space: dict[str, Any]) -> None:
        """Record the names and values of a Python module, without the contents of the values."""
        restore = partial(_restore_dict, space, list(space.items()))
        self._contents.setdefault(id(space), (space, restore))

    def note_module(self, module: nn.Module) -> None:
        """Record the contents of the attributes of ``module`` and its submodules."""
        for owner in module.modules():
            for name, value in owner.__dict__.items():
                if name not in _OWN_NAMES:
                    self.note_contents(value)

    def tensors(self) -> list[torch.Tensor]:
        """Return the recorded tensors."""
        return list(self._tensors.values())

    def values(self) -> Iterator[Any]:
        """Yield the current values of recorded places, added names and recorded containers."""
        yield from (source.now() for source in self._places.values())
        for source, before in self._namespaces.values():
            yield from (vars(source.value)[name] for name in names_added(source, before))
        yield from (value for value, _ in self._contents.values())

    def exchange(self, copies: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Replace copies of tensors, which forward has kept, by the tensors themselves.

        Args:
            copies: pairs of a copy and its original, by the id of the copy.
        """
        for source in self._places.values():
            if id(source.now()) in copies:
                source.assign(copies[id(source.now())][1])
        for source, before in self._namespaces.values():
            for name in names_added(source, before):
                if id(vars(source.value)[name]) in copies:
                    setattr(source.value, name, copies[id(vars(source.value)[name])][1])
        for held in [held for value in self.values() for held in all_held(value)]:
            entries = _entries(held)
            for key, value in list(entries.items()):
                if id(value) in copies:
                    entries[key] = copies[id(value)][1]
            if isinstance(held, list | deque):
                for index, value in enumerate(held):
                    if id(value) in copies:
                        held[index] = copies[id(value)][1]

    def merge(self, later: Undo) -> None:
        """Add the records of ``later``; earlier records of the same places stay."""
        self._places = {**later._places, **self._places}
        self._namespaces = {**later._namespaces, **self._namespaces}
        self._contents = {**later._contents, **self._contents}
        self._tensors = {**later._tensors, **self._tensors}

    def restore(self) -> None:
        """Restore the recorded places, namespaces and contents."""
        for source in self._places.values():
            if _is_assigned(source):
                source.restore()
        # Last: a later run records the names that an earlier run has added as places.
        for source, before in self._namespaces.values():
            for name in list(names_added(source, before)):
                delattr(source.value, name)
        for _, restore in self._contents.values():
            restore()


_current: contextvars.ContextVar[Undo | None] = contextvars.ContextVar("undo", default=None)


def current_undo() -> Undo:
    """Return the record of the innermost :func:`undone_if_refused`; without one, an unused one."""
    return _current.get() or Undo()


@contextmanager
def undone_if_refused() -> Iterator[Undo]:
    """If an exception leaves this context, restore what forward has changed inside it."""
    outer, undo = _current.get(), Undo()
    token = _current.set(undo)
    try:
        yield undo
    except BaseException:
        undo.restore()
        raise
    else:
        if outer is not None:
            outer.merge(undo)
    finally:
        _current.reset(token)


def _is_assigned(source: Source) -> bool:
    """Whether something else is at ``source`` now; settings of libraries are restored elsewhere."""
    owner, value, now = source.owner, source.value, source.now()
    if now is value or (is_constant(value) and same_value(now, value)):
        return False
    named = "__name__" if isinstance(owner, ModuleType) else "__module__"
    return isinstance(owner, threading.local) or not is_library(getattr(owner, named, None))


def _restoring(value: Any) -> Callable[[], None] | None:
    """Return a function that gives ``value`` its current contents again.

    Return None if it has no contents that can be assigned.
    """
    if value is os.environ:
        return partial(_restore_variables, dict(os.environ))
    if isinstance(value, contextvars.ContextVar):
        set_to = value.get(MISSING)
        return None if set_to is MISSING else partial(_restore_variable, value, set_to)
    if isinstance(value, dict):
        return partial(_restore_dict, value, list(dict.items(value)))
    if isinstance(value, list):
        return partial(list.__setitem__, value, slice(None), list(list.__iter__(value)))
    if isinstance(value, set | deque):
        return partial(_restore_items, value, list(value))
    if isinstance(value, bytearray | array.array):
        return partial(type(value).__setitem__, value, slice(None), value[:])
    if isinstance(value, numpy.ndarray):
        return partial(_restore_array, value, value.copy()) if value.flags.writeable else None
    if isinstance(value, queue.SimpleQueue):
        return partial(_shorten, value, value.qsize())
    if isinstance(value, queue.Queue) or (is_object(value) and is_plain_class(type(value))):
        return partial(_restore_object, value, _attributes(value))
    return None


def _entries(value: Any) -> dict[Any, Any]:
    """Return the dict of entries or attributes that can be assigned in ``value``."""
    if isinstance(value, dict):
        return value
    plain = is_object(value) and is_plain_class(type(value))
    return getattr(value, "__dict__", {}) if plain else {}


def _restore_variables(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update({n: v for n, v in before.items() if os.environ.get(n) != v})


def _restore_variable(variable: contextvars.ContextVar[Any], before: Any) -> None:
    if variable.get(MISSING) is not before:
        variable.set(before)


def _restore_dict(value: dict[Any, Any], before: list[tuple[Any, Any]]) -> None:
    held = dict(before)
    for key in [key for key in value if key not in held]:
        dict.__delitem__(value, key)
    for key, entry in before:
        if dict.get(value, key, MISSING) is not entry:
            dict.__setitem__(value, key, entry)
    if list(dict.keys(value)) != list(held):  # a removed entry has come back at the end
        kind: type[dict[Any, Any]] = OrderedDict if isinstance(value, OrderedDict) else dict
        kind.clear(value)
        kind.update(value, before)


def _restore_items(value: set[Any] | deque[Any], before: list[Any]) -> None:
    if isinstance(value, set):
        set.clear(value)
        set.update(value, before)
    else:
        deque.clear(value)
        deque.extend(value, before)


def _restore_array(value: numpy.ndarray[Any, Any], before: numpy.ndarray[Any, Any]) -> None:
    if value.shape == before.shape and value.tobytes() != before.tobytes():
        value[...] = before


def _shorten(value: queue.SimpleQueue[Any], size: int) -> None:
    """Remove the items that were added to a queue; items that were taken stay away."""
    items = [value.get_nowait() for _ in range(value.qsize())] if value.qsize() > size else []
    for item in items[:size]:
        value.put(item)


def _attributes(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the attributes of an object in its ``__dict__``, and the ones in its slots."""
    slots = {name: getattr(value, name, MISSING) for name in slots_of(type(value))}  # type: ignore[arg-type]
    return dict(getattr(value, "__dict__", {})), slots


def _restore_object(value: Any, before: tuple[dict[str, Any], dict[str, Any]]) -> None:
    held, slots = before
    now = getattr(value, "__dict__", {})
    if now.keys() != held.keys() or any(now[name] is not held[name] for name in held):
        now.clear()
        now.update(held)
    for name, attribute in slots.items():
        if attribute is MISSING:
            if hasattr(value, name):
                object.__delattr__(value, name)
        elif getattr(value, name, MISSING) is not attribute:
            object.__setattr__(value, name, attribute)
