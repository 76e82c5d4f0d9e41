"""Undo: restore what runs of forward changed outside the module, if the capture is refused.

A capture runs forward several times. In eager PyTorch these runs would not exist, so a counter in
a global, an entry of a list or an attribute of a class must have its old value after a refusal.
"""

from __future__ import annotations

import array
import contextvars
import os
import queue
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
from torch import nn

from tvmbridge.core.contents import CONTAINERS, MISSING, all_held, slots_of
from tvmbridge.graph_capture.observe.data import is_data, is_object, is_plain_class
from tvmbridge.graph_capture.observe.sources import Source, names_added

_OWN_NAMES = ("_parameters", "_buffers", "_modules")


class Undo:
    """The values outside the module, as they were when a run of forward first met them."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, str], Source] = {}
        self._namespaces: dict[int, tuple[Source, frozenset[str]]] = {}
        # By id: the object, which the entry keeps alive, and the function that restores it.
        self._contents: dict[int, tuple[Any, Callable[[], None]]] = {}

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
            restore = None if id(held) in self._contents else _restoring(held)
            if restore is not None:
                self._contents[id(held)] = held, restore

    def note_module(self, module: nn.Module) -> None:
        """Record the contents of the attributes of ``module`` and its submodules."""
        for owner in module.modules():
            for name, value in owner.__dict__.items():
                if name not in _OWN_NAMES:
                    self.note_contents(value)

    def merge(self, later: Undo) -> None:
        """Add the records of ``later``; earlier records of the same places stay."""
        self._places = {**later._places, **self._places}
        self._namespaces = {**later._namespaces, **self._namespaces}
        self._contents = {**later._contents, **self._contents}

    def restore(self) -> None:
        """Restore the recorded places, namespaces and contents."""
        for source in self._places.values():
            if source.now() is not source.value:
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
    if isinstance(value, queue.Queue) or (is_object(value) and is_plain_class(type(value))):
        return partial(_restore_object, value, _attributes(value))
    return None


def _restore_variables(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update({n: v for n, v in before.items() if os.environ.get(n) != v})


def _restore_variable(variable: contextvars.ContextVar[Any], before: Any) -> None:
    if variable.get(MISSING) is not before:
        variable.set(before)


def _restore_dict(value: dict[Any, Any], before: list[tuple[Any, Any]]) -> None:
    now = list(dict.items(value))
    if len(now) == len(before) and all(
        a is c and b is d for (a, b), (c, d) in zip(now, before, strict=True)
    ):
        return
    kind: type[dict[Any, Any]] = OrderedDict if isinstance(value, OrderedDict) else dict
    kind.clear(value)
    kind.update(value, before)


def _restore_items(value: set[Any] | deque[Any], before: list[Any]) -> None:
    kind: Any = set if isinstance(value, set) else deque
    add = kind.update if kind is set else kind.extend
    kind.clear(value)
    add(value, before)


def _restore_array(value: numpy.ndarray[Any, Any], before: numpy.ndarray[Any, Any]) -> None:
    if value.shape == before.shape and value.tobytes() != before.tobytes():
        value[...] = before


def _attributes(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the attributes of an object in its ``__dict__``, and the ones in its slots."""
    slots = {name: getattr(value, name, MISSING) for name in slots_of(type(value))}
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
