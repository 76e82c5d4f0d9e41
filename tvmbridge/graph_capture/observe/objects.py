"""Objects: record which attributes of plain objects, such as configurations, forward reads.

While forward is observed, a recorder replaces ``__getattribute__`` of the objects' classes. A read
of a special attribute such as ``__dict__`` counts as a read of the whole object; ``vars``,
``copy``, ``pickle`` and ``repr`` read special attributes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from torch import nn

from tvmbridge.calls.copies import copied_values
from tvmbridge.calls.patches import patched_here
from tvmbridge.core.contents import (
    DEPTH,
    MISSING,
    PartOf,
    all_held,
    attributes_of,
    deeper,
    holds_all_in_dict,
    is_constant,
    is_flat,
    same_value,
    slots_of,
)
from tvmbridge.core.states import StateOf, is_weak, reader_of, referent
from tvmbridge.graph_capture.observe.data import is_of_users
from tvmbridge.graph_capture.observe.names import SEARCHING, Names
from tvmbridge.graph_capture.trace.traced_numbers import TracedNumber

# Special attributes that do not depend on the contents of an object.
_OF_CLASS = frozenset({"__class__", "__doc__", "__module__"})


class ObjectReads:
    """Record the attributes of plain objects that forward's thread reads.

    - ``looked_up``: names that user code may look up as attributes.
    - ``blind``: whether user code may read attributes past the recorder. Objects then count as read
      as a whole.
    """

    def __init__(self) -> None:
        self.blind = False
        self.looked_up: set[str] = set()
        # By id: a recorded object and the names that were read. Holding the object keeps its id
        # from being used again.
        self._reads: dict[int, tuple[Any, set[str]]] = {}
        # Weak references that were followed, by id.
        self._references: dict[int, Any] = {}
        # Values of attributes that were followed, by id.
        self._followed: dict[int, Any] = {}
        # Names that functions use which do not run while forward is observed.
        self._unseen: set[str] = set()
        self._kinds: dict[type, bool] = {}
        self._patches: ExitStack | None = None
        self._active = False

    @contextmanager
    def recording(self, module: nn.Module) -> Iterator[None]:
        """Record reads inside this context.

        Objects in attributes of ``module`` are recorded, and objects passed to :meth:`follow`.
        """
        with ExitStack() as patches:
            self._patches = patches
            known: set[int] = set()
            for owner in module.modules():
                for name, value in owner.__dict__.items():
                    if (
                        name not in ("_parameters", "_buffers", "_modules")
                        and id(value) not in known
                    ):
                        known.add(id(value))
                        self.follow(value)
            self._active = True
            try:
                yield
            finally:
                self._active, self._patches = False, None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend the recording inside this context, while the bridge itself reads objects."""
        active, self._active = self._active, False
        try:
            yield
        finally:
            self._active = active

    def follow(self, value: Any) -> None:
        """Record from now on reads of ``value`` and of the objects that it holds."""
        if self._patches is None:
            return
        for held in all_held(value):
            if is_weak(held) and id(held) not in self._references:
                self._references[id(held)] = held
                self.follow(referent(held))
            kind = type(held)
            if kind not in self._kinds:
                self._kinds[kind] = _can_be_followed(kind)
                if self._kinds[kind]:
                    self._patches.enter_context(patched_here(kind, "__getattribute__", self._read))
            if self._kinds[kind]:
                self._reads.setdefault(id(held), (held, set()))

    def _read(self, genuine: Callable[..., Any], owner: Any, name: str) -> Any:
        # The frames of the patch's call and stub are between this function and the reader.
        if self._active and id(owner) in self._reads and not _is_bridge(sys._getframe(3)):
            self._reads[id(owner)][1].add(name)
            found = genuine(owner, name)
            constant = is_constant(found) or type(found) is TracedNumber
            if id(found) not in self._followed and not constant:
                self._followed[id(found)] = found
                self.follow(found)  # It may lie deeper than the objects that are recorded yet.
            return found
        return genuine(owner, name)

    def note_unseen(self, names: Names) -> None:
        """Count attributes as read that have a name used by a function which does not run."""
        self._unseen |= names.looked_up
        if names.looked_up & SEARCHING:
            self.blind = True

    def state(self, value: Any, depth: float = DEPTH) -> StateOf:
        """Return the present state of ``value``, which no later change reaches."""
        reader = reader_of(type(value))
        parts = reader.read(value) if reader is not None and depth > 0 else []
        copies = copied_values(dict(enumerate(parts)))
        inside = deeper(value, depth)
        return StateOf(type(value), [self._part(p, copies[i], inside) for i, p in enumerate(parts)])

    def _part(self, value: Any, copied: Any, depth: float) -> Any:
        stateful = reader_of(type(value)) is not None
        return self.state(value, depth) if stateful else self.narrowed(value, copied, depth=depth)

    def narrowed(
        self,
        value: Any,
        copied: Any,
        beside: Any = MISSING,
        depth: float = DEPTH,
        around: frozenset[int] = frozenset(),
    ) -> Any:
        """Return ``copied`` with a :class:`PartOf` for each object that was read only in part.

        A ``PartOf`` has only the attributes that were read.

        Args:
            copied: a copy of ``value``, or ``value`` itself.
            beside: another state of ``value``; attributes that differ in it count as read.
            around: the ids of the objects that hold ``value``.
        """
        if type(copied) is not type(value):
            return copied
        reader = reader_of(type(value))
        if reader is not None:
            counts = reader.names is None or not reader.names.isdisjoint(self.looked_up)
            return self.state(value, depth) if counts else StateOf(type(value), None)
        if depth <= 0:
            return copied
        if is_flat(value) and is_flat(copied):
            return type(value)(copied)
        inside = deeper(value, depth)
        if type(value) in (list, tuple) and len(value) == len(copied):
            states = _items_beside(value, beside)
            each = zip(value, copied, states, strict=True)
            return type(value)(self.narrowed(*items, inside, around) for items in each)
        if type(value) is dict and list(value) == list(copied):
            states = _items_beside(value, beside)
            each = zip(value.values(), copied.values(), states, strict=True)
            held = (self.narrowed(*items, inside, around) for items in each)
            return dict(zip(value, held, strict=True))
        if self.blind or id(value) not in self._reads:
            return self._whole(value, copied, depth, around)
        return self._part_of(value, copied, beside, depth, around)

    def _part_of(
        self, value: Any, copied: Any, beside: Any, depth: float, around: frozenset[int]
    ) -> Any:
        """Return a :class:`PartOf` for a recorded object, or ``copied`` if all of it was read."""
        names = self._reads[id(value)][1] | {n for n in self._unseen if _defines(value, n)}
        if any(_is_special(n) and n not in _OF_CLASS for n in names):
            return self._whole(value, copied, depth, around)
        if type(beside) is type(value):
            names |= _differing(vars(value), vars(beside))
        part = PartOf(type(value), {}, _has_own_lookup(type(value)))
        if id(value) in around:  # Its attributes are compared where it was met first.
            return part
        for name in sorted(n for n in names if not _is_special(n)):
            found, copy = part.found(value, name), part.found(copied, name)
            state = part.found(beside, name) if type(beside) is type(value) else MISSING
            within = around | {id(value)}
            part.attributes[name] = self.narrowed(found, copy, state, depth, within)
        return part

    def _whole(self, value: Any, copied: Any, depth: float, around: frozenset[int]) -> Any:
        """Return ``copied``; for an object that holds states, which a copy shares, its parts."""
        held = all_held(value, depth=depth) if is_of_users(type(value)) else []
        if id(value) in around or all(reader_of(type(each)) is None for each in held):
            return copied
        kind = type(value)
        part = PartOf(kind, {}, bool(slots_of(kind)))  # type: ignore[arg-type]
        within, inside = around | {id(value)}, deeper(value, depth)
        for name, each in attributes_of(value).items():
            copy = part.found(copied, name)
            part.attributes[name] = self.narrowed(each, copy, MISSING, inside, within)
        return part


# Records no reads, so that each object counts as read as a whole.
NO_READS = ObjectReads()


def _is_bridge(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "tvmbridge"


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _defines(value: Any, name: str) -> bool:
    """Whether ``value`` or its class has an attribute ``name``, without a look-up by user code."""
    return name in vars(value) or any(name in vars(c) for c in type(value).__mro__)


def _items_beside(value: Any, beside: Any) -> list[Any]:
    if type(beside) is not type(value) or len(beside) != len(value):
        return [MISSING] * len(value)
    return list(beside.values() if isinstance(beside, dict) else beside)


def _differing(ours: dict[str, Any], theirs: dict[str, Any]) -> set[str]:
    every = ours.keys() | theirs.keys()
    return {n for n in every if not same_value(ours.get(n, MISSING), theirs.get(n, MISSING))}


def _has_own_lookup(kind: type) -> bool:
    """Whether a user's class defines its own ``__getattribute__``."""
    return any("__getattribute__" in vars(c) for c in kind.__mro__ if c is not object)


def _can_be_followed(kind: type) -> bool:
    """Whether all reads of attributes of the objects of ``kind`` can be recorded.

    The class must be a user's, allow the recorder, and keep all state of objects in ``__dict__``.
    """
    if not is_of_users(kind) and kind is not argparse.Namespace:
        return False
    # A metaclass with its own ``__setattr__`` may refuse the recorder.
    return type(kind).__setattr__ is type.__setattr__ and holds_all_in_dict(kind)
