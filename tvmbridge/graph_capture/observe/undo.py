"""Undo: restore what runs of forward changed outside the module, if the capture is refused.

A capture runs forward several times. In eager PyTorch these runs would not exist, so a counter in
a global, an entry of a list or an attribute of a class must have its old value after a refusal.
Changes of other threads, and changes between the runs, stay.
"""

from __future__ import annotations

import contextvars
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import nn

from tvmbridge.core.contents import CONTAINERS, MISSING, all_held, is_constant, same_value
from tvmbridge.graph_capture.observe.data import is_data, is_object
from tvmbridge.graph_capture.observe.executed import is_library
from tvmbridge.graph_capture.observe.snapshots import (
    has_attributes,
    same_snapshot,
    snapshot,
    without_own,
    write,
    write_changes,
)
from tvmbridge.graph_capture.observe.sources import Source, names_added, names_in

logger = logging.getLogger(__name__)

_OWN_NAMES = ("_parameters", "_buffers", "_modules")


@dataclass
class _Record:
    """What the runs of forward have changed in one object or at one place.

    - ``holder``: the object, which the record keeps alive.
    - ``read``: returns a snapshot of the contents.
    - ``write``: gets the snapshot of now, and the contents to write.
    - ``before``: the contents without the changes of the runs.
    - ``after``: the contents at the end of the last run.
    """

    holder: Any
    read: Callable[[], Any]
    write: Callable[[Any, Any], None]
    before: Any
    after: Any

    def begin(self) -> None:
        """Note the contents at the beginning of a run: other code may have changed them."""
        if isinstance(self.after, numpy.ndarray):  # Comparing a large array takes long.
            return
        now = self.read()
        if not same_snapshot(now, self.after):
            self.before, self.after = without_own(self.before, self.after, now), now

    def end(self) -> None:
        """Note the contents at the end of a run."""
        if isinstance(self.after, numpy.ndarray) and same_snapshot(self.after, self.holder):
            return  # without a copy
        now = self.read()
        if not same_snapshot(now, self.after):
            self.after = now

    def restore(self) -> None:
        """Take the changes of the runs back."""
        if same_snapshot(self.before, self.after):
            return
        now = self.read()
        contents = without_own(self.before, self.after, now)
        if not same_snapshot(now, contents):
            self.write(now, contents)


class Undo:
    """The values outside the module, as they were when a run of forward first met them."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, str], Source] = {}
        self._namespaces: dict[int, tuple[Source, frozenset[str]]] = {}
        self._contents: dict[int, Any] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        # By the kind of the record, and by the key of the place or the id of the object.
        self._records: dict[tuple[str, Any], _Record] = {}
        self._running = 0

    def _record(
        self, key: tuple[str, Any], holder: Any, read: Callable[[], Any], write: Callable[..., None]
    ) -> None:
        if key in self._records:
            return
        try:
            before = read()
        except Exception:  # A class of the user's may raise any error.
            logger.debug("the contents of a %s cannot be read", type(holder), exc_info=True)
            return
        if before is not None:
            self._records[key] = _Record(holder, read, write, before, before)

    def note_place(self, source: Source) -> None:
        """Record the object at ``source`` and its contents, unless it is a setting of a library."""
        if self._places.setdefault(source.key, source) is not source:
            return
        if not _is_of_library(source.owner):
            change = partial(_write_place, source)
            self._record(("place", source.key), source, partial(_at_place, source), change)
            self.note_contents(source.value)
        elif source.value is os.environ or source.value is os.getenv:
            self.note_contents(os.environ)
        if isinstance(source.value, contextvars.ContextVar):
            self.note_contents(source.value)
            self.note_contents(source.value.get(None))

    def note_namespace(self, source: Source) -> None:
        """Record the names that the namespace at ``source`` has."""
        key = id(source.value)
        if key in self._namespaces:
            return
        self._namespaces[key] = source, frozenset(names_in(source))
        put, remove = partial(setattr, source.value), partial(delattr, source.value)
        read = partial(_names_added, *self._namespaces[key])
        change = partial(write_changes, assign=put, remove=remove)
        self._record(("namespace", key), source, read, change)

    def note_contents(self, value: Any) -> None:
        """Record the contents of the containers and plain objects in ``value``."""
        if value is sys.modules:  # Imports stay.
            return
        whole = isinstance(value, (torch.Tensor, numpy.ndarray)) or value is os.environ
        looked_into = isinstance(value, CONTAINERS) or is_data(value) or is_object(value)
        for held in all_held(value) if looked_into and not whole else [value]:
            if isinstance(held, torch.Tensor):
                self._tensors[id(held)] = held
            if type(held) is not tuple and is_constant(held):
                continue
            key = ("contents", id(held))
            self._record(key, held, partial(snapshot, held), partial(write, held))
            if key in self._records:
                self._contents[id(held)] = held

    def note_names(self, space: dict[str, Any]) -> None:
        """Record the names and values of a Python module, without the contents of the values."""
        put, remove = partial(dict.__setitem__, space), partial(dict.__delitem__, space)
        change = partial(write_changes, assign=put, remove=remove)
        self._record(("contents", id(space)), space, partial(dict, space), change)
        self._contents[id(space)] = space

    def note_module(self, module: nn.Module) -> None:
        """Record the contents of the attributes of ``module`` and its submodules."""
        for owner in module.modules():
            for name, value in owner.__dict__.items():
                if name not in _OWN_NAMES:
                    self.note_contents(value)

    @contextmanager
    def run(self) -> Iterator[None]:
        """Attribute the changes inside this context to a run of forward; it may be nested."""
        if not self._running:
            self._each(_Record.begin)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._each(_Record.end)

    def _each(self, do: Callable[[_Record], None]) -> None:
        """Call ``do`` with all records, and drop a record whose contents cannot be read."""
        for key, record in list(self._records.items()):
            try:
                do(record)
            except Exception:
                kind = type(record.holder).__name__
                logger.warning("changes of a %s by a capture stay", kind, exc_info=True)
                del self._records[key]

    def tensors(self) -> list[torch.Tensor]:
        """Return the recorded tensors."""
        return list(self._tensors.values())

    def values(self) -> Iterator[Any]:
        """Yield the current values of recorded places, added names and recorded containers."""
        yield from (source.now() for source in self._places.values())
        for source, before in self._namespaces.values():
            yield from (vars(source.value)[name] for name in names_added(source, before))
        yield from self._contents.values()

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
        for held in all_held(*self.values()):
            entries = _entries(held)
            for key, value in list(entries.items()):
                if id(value) in copies:
                    entries[key] = copies[id(value)][1]
            if isinstance(held, list | deque):
                for index, value in enumerate(held):
                    if id(value) in copies:
                        held[index] = copies[id(value)][1]

    def merge(self, later: Undo) -> None:
        """Add the records of ``later``; earlier contents of the same places stay."""
        self._places = {**later._places, **self._places}
        self._namespaces = {**later._namespaces, **self._namespaces}
        self._contents = {**later._contents, **self._contents}
        self._tensors = {**later._tensors, **self._tensors}
        for key, record in later._records.items():
            own = self._records.setdefault(key, record)
            own.before = without_own(own.before, own.after, record.before)
            own.after = record.after

    def restore(self) -> None:
        """Take back what the runs changed in the recorded places, namespaces and contents."""
        # First: a later run records the names that an earlier run has added as places.
        order = ("namespace", "place", "contents")
        self._records = dict(sorted(self._records.items(), key=lambda r: order.index(r[0][0])))
        self._each(_Record.restore)


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


def _is_of_library(owner: Any) -> bool:
    if isinstance(owner, threading.local | nn.Module):
        return False
    named = "__name__" if isinstance(owner, ModuleType) else "__module__"
    return owner is sys.modules or is_library(getattr(owner, named, None))


def _at_place(source: Source) -> dict[str, Any]:
    now, value = source.now(), source.value
    if now is MISSING:
        return {}
    return {"": value if is_constant(value) and same_value(now, value) else now}


def _write_place(source: Source, now: dict[str, Any], contents: dict[str, Any]) -> None:
    replace(source, value=contents.get("", MISSING)).restore()


def _names_added(source: Source, before: frozenset[str]) -> dict[str, Any]:
    return {name: vars(source.value)[name] for name in names_added(source, before)}


def _entries(value: Any) -> dict[Any, Any]:
    """Return the dict of entries or attributes that can be assigned in ``value``."""
    if isinstance(value, dict):
        return value
    return getattr(value, "__dict__", {}) if has_attributes(value) else {}
