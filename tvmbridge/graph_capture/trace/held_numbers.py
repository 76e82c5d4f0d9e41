"""Held numbers: Python numbers in attributes of modules that are inputs of compiled code.

A stand-in (the copy of a module that is traced) holds each such number as a buffer too. Forward
finds a traced number of this buffer in the attribute. It may assign a number computed from it, as a
counter does that grows, starts again or counts modulo, or a constant. Any other assignment is
refused.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn

from tvmbridge.core.contents import MISSING
from tvmbridge.core.errors import NumberReadError
from tvmbridge.core.number_inputs import NumberRange, as_tensor, is_number
from tvmbridge.core.set_within import set_within
from tvmbridge.core.types import Key, Left
from tvmbridge.graph_capture.trace.traced_numbers import NumbersOfCall, TracedNumber

# The attributes whose numbers become inputs of what is captured now, by the id of the module.
_wanted: ContextVar[tuple[int, Collection[Key]]] = ContextVar("held numbers", default=(0, ()))
# For each stand-in, its held numbers by the names of their buffers.
_HELD: weakref.WeakKeyDictionary[nn.Module, dict[str, Key]] = weakref.WeakKeyDictionary()


def numbers_wanted(module: nn.Module, keys: Collection[Key]) -> AbstractContextManager[object]:
    """Within the context, captures of ``module`` take the numbers of these attributes as inputs."""
    return set_within(_wanted, (id(module), keys))


def hold(stand_in: nn.Module, module: nn.Module) -> dict[str, torch.Tensor]:
    """Register the wanted numbers of ``module`` as buffers of its stand-in; return them by name."""
    wanted, keys = _wanted.get()
    if wanted != id(module):
        return {}
    held: dict[str, Key] = {}
    for path, attribute in sorted(keys):
        value = stand_in.get_submodule(path).__dict__.get(attribute, MISSING)
        if is_number(value) and NumberRange(type(value)).holds(value):
            name = "number_" + re.sub(r"\W", "_", f"{path}_{attribute}").strip("_")
            while hasattr(stand_in, name):
                name += "_"
            stand_in._buffers[name] = as_tensor(value)
            held[name] = path, attribute
    _HELD[stand_in] = held
    return {name: stand_in._buffers[name] for name in held}  # type: ignore[misc]


def held_by(stand_in: nn.Module) -> Mapping[str, Key]:
    """Return the attributes whose numbers ``stand_in`` holds, by the names of their buffers."""
    return _HELD.get(stand_in, {})


def start_again(stand_in: nn.Module) -> None:
    """Set the attributes to the numbers that they had before any forward of ``stand_in`` ran."""
    for name, (path, attribute) in held_by(stand_in).items():
        buffer = stand_in._buffers[name]
        assert buffer is not None
        stand_in.get_submodule(path).__dict__[attribute] = buffer.item()


class HeldOfCall:
    """The held numbers of one traced call of a stand-in.

    - ``ranges``: the values for which the trace holds, by the name of a buffer.
    - ``ways``: how forward changes these attributes, once it has returned.
    """

    def __init__(self, stand_in: nn.Module) -> None:
        self._stand_in = stand_in
        self._held = held_by(stand_in)
        self._leaves = {name: -1 - i for i, name in enumerate(self._held)}
        self.ranges: dict[str, NumberRange] = {}
        self.ways: dict[Key, Left] = {}
        for name, (path, attribute) in self._held.items():
            value = stand_in.get_submodule(path).__dict__[attribute]
            self.ranges[name] = NumberRange(type(value), sample=value)

    def by_leaf(self) -> dict[int, NumberRange]:
        """Return the ranges by the numbers -1, -2, ..., one for each attribute.

        Leaves of the arguments have the numbers 0, 1, ... in the same dictionaries.
        """
        return {self._leaves[name]: known for name, known in self.ranges.items()}

    def keys(self, leaves: Collection[int]) -> frozenset[Key]:
        """Return the attributes whose negative numbers (see :meth:`by_leaf`) are in ``leaves``."""
        return frozenset(self._held[n] for n, leaf in self._leaves.items() if leaf in leaves)

    @contextmanager
    def in_attributes(self, of: NumbersOfCall) -> Iterator[None]:
        """Set the attributes to traced numbers in this context, and to their old values after it.

        Raises:
            NumberReadError: forward has assigned a value that is not computed from these numbers.
        """
        before: dict[str, float] = {}
        for name, (path, attribute) in self._held.items():
            held = self._stand_in.get_submodule(path).__dict__
            tensor = self._stand_in._buffers[name]
            assert tensor is not None
            before[name], held[attribute] = held[attribute], of.traced(self._leaves[name], tensor)
        left: dict[str, object] = {}
        try:
            yield
        finally:
            for name, (path, attribute) in self._held.items():
                held = self._stand_in.get_submodule(path).__dict__
                left[name], held[attribute] = held.get(attribute), before[name]
        for name in self._held:
            self._note(name, left.pop(name))

    def _note(self, name: str, value: object) -> None:
        leaf, key = self._leaves[name], self._held[name]
        if is_number(value):
            self.ways[key] = Left(number=partial(_always, value))
        elif type(value) is TracedNumber and value.computed is not None:
            of = self.keys(value.leaves)
            if of == {key} and value.shift == 0:
                return
            if not of:
                raise value.refused("keeps it in an attribute")
            self.ways[key] = Left(number=value.computed, of=next(iter(of)))
        else:
            attribute = ".".join(filter(None, key))
            raise NumberReadError(f"forward assigns to {attribute}", frozenset({leaf}))


def _always(value: Any, before: Any) -> Any:
    return value
