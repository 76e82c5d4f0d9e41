"""Objects: which attributes of plain objects, such as configurations, forward reads.

A recorder stands in for ``__getattribute__`` of their classes while forward is observed. Who reads
a special attribute (``vars``, ``copy``, ``pickle`` and ``repr`` do), reads all of the object.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from torch import nn

from tvmbridge.core.contents import (
    DEPTH,
    MISSING,
    PartOf,
    all_held,
    holds_all_in_dict,
    same_value,
)
from tvmbridge.graph_capture.observe.data import is_of_users
from tvmbridge.graph_capture.trace.patches import patched_here

# Special attributes that say nothing of what an object holds.
_OF_CLASS = frozenset({"__class__", "__doc__", "__module__"})


class ObjectReads:
    """Records attributes that are read of plain objects, in the thread that forward runs in.

    ``blind``: code of users reads attributes past the recorder, so that nothing is left out.
    """

    def __init__(self) -> None:
        self.blind = False
        # Of what is followed, by id; it is held, so that nothing else has the id.
        self._reads: dict[int, tuple[Any, set[str]]] = {}
        self._kinds: dict[type, bool] = {}
        self._patches: ExitStack | None = None
        self._active = False

    @contextmanager
    def recording(self, module: nn.Module) -> Iterator[None]:
        """Within it reads are recorded: of what the attributes of ``module`` hold, and followed."""
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
        """Within it the bridge itself reads."""
        active, self._active = self._active, False
        try:
            yield
        finally:
            self._active = active

    def follow(self, value: Any) -> None:
        """Record from now on what is read of ``value`` and of what it holds."""
        if self._patches is None:
            return
        for held in all_held(value):
            kind = type(held)
            if kind not in self._kinds:
                self._kinds[kind] = _can_be_followed(kind)
                if self._kinds[kind]:
                    self._patches.enter_context(patched_here(kind, "__getattribute__", self._read))
            if self._kinds[kind]:
                self._reads.setdefault(id(held), (held, set()))

    def _read(self, genuine: Callable[..., Any], owner: Any, name: str) -> Any:
        # The patch's call and its stub stand between this function and the one who reads.
        if self._active and id(owner) in self._reads and not _is_bridge(sys._getframe(3)):
            self._reads[id(owner)][1].add(name)
        return genuine(owner, name)

    def narrowed(self, value: Any, copied: Any, beside: Any = MISSING, depth: int = DEPTH) -> Any:
        """``copied``, a copy of ``value``, with parts in place of objects that were read in part.

        Args:
            value: what forward has read.
            copied: its copy, or itself.
            beside: another state of it; attributes that differ there belong to the parts too.
            depth: how deep objects are looked into.
        """
        if depth == 0 or self.blind or type(copied) is not type(value):
            return copied
        if type(value) in (list, tuple) and len(value) == len(copied):
            states = _items_beside(value, beside)
            each = zip(value, copied, states, strict=True)
            return type(value)(self.narrowed(*items, depth - 1) for items in each)
        if type(value) is dict and list(value) == list(copied):
            states = _items_beside(value, beside)
            each = zip(value.values(), copied.values(), states, strict=True)
            return dict(zip(value, (self.narrowed(*i, depth - 1) for i in each), strict=True))
        if id(value) not in self._reads:
            return copied
        names = set(self._reads[id(value)][1])
        if any(_is_special(n) and n not in _OF_CLASS for n in names):
            return copied
        if type(beside) is type(value):
            names |= _differing(vars(value), vars(beside))
        part = PartOf(type(value), {}, _has_own_lookup(type(value)))
        for name in sorted(n for n in names if not _is_special(n)):
            found, copy = part.found(value, name), part.found(copied, name)
            state = part.found(beside, name) if type(beside) is type(value) else MISSING
            part.attributes[name] = self.narrowed(found, copy, state, depth - 1)
        return part


# Nothing is followed: all of an object is read.
NO_READS = ObjectReads()


def _is_bridge(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "tvmbridge"


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _items_beside(value: Any, beside: Any) -> list[Any]:
    if type(beside) is not type(value) or len(beside) != len(value):
        return [MISSING] * len(value)
    return list(beside.values() if isinstance(beside, dict) else beside)


def _differing(ours: dict[str, Any], theirs: dict[str, Any]) -> set[str]:
    every = ours.keys() | theirs.keys()
    return {n for n in every if not same_value(ours.get(n, MISSING), theirs.get(n, MISSING))}


def _has_own_lookup(kind: type) -> bool:
    """Whether a class of users decides itself what an attribute is."""
    return any("__getattribute__" in vars(c) for c in kind.__mro__ if c is not object)


def _can_be_followed(kind: type) -> bool:
    """Whether what is read of objects of a class of users can be recorded, and is all of it."""
    if not is_of_users(kind) and kind is not argparse.Namespace:
        return False
    # The class of a class may refuse the recorder.
    return type(kind).__setattr__ is type.__setattr__ and holds_all_in_dict(kind)
