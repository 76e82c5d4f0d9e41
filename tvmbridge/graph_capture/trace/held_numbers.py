"""Held numbers: Python numbers in modules that are inputs of compiled code.

An attribute of a module is such a number, or holds a container or a plain object with it.

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

from tvmbridge.core.contents import AnyNumber
from tvmbridge.core.errors import NumberReadError
from tvmbridge.core.number_inputs import NumberRange, as_tensor, is_number
from tvmbridge.core.number_places import (
    container_of,
    is_set_plainly,
    label_of,
    number_in,
    set_number_in,
)
from tvmbridge.core.set_within import set_within
from tvmbridge.core.types import Left, NumberKey
from tvmbridge.graph_capture.trace.traced_numbers import NumbersOfCall, TracedNumber

# The places whose numbers become inputs of what is captured now, by the id of the module.
_wanted: ContextVar[tuple[int, Collection[NumberKey]]] = ContextVar("held numbers", default=(0, ()))
# For each stand-in, its held numbers by the names of their buffers.
_HELD: weakref.WeakKeyDictionary[nn.Module, dict[str, NumberKey]] = weakref.WeakKeyDictionary()


def numbers_wanted(
    module: nn.Module, keys: Collection[NumberKey]
) -> AbstractContextManager[object]:
    """Within the context, captures of ``module`` take the numbers at these places as inputs."""
    return set_within(_wanted, (id(module), keys))


def hold(stand_in: nn.Module, module: nn.Module) -> dict[str, torch.Tensor]:
    """Register the wanted numbers of ``module`` as buffers of its stand-in; return them by name."""
    wanted, keys = _wanted.get()
    if wanted != id(module):
        return {}
    held: dict[str, NumberKey] = {}
    for key in sorted(keys, key=label_of):
        # Two keys may name one place, in a container that two modules share. The first is held.
        value = _number(stand_in, key)
        if is_number(value) and NumberRange(type(value)).holds(value):
            name = "number_" + re.sub(r"\W+", "_", label_of(key)).strip("_")
            while hasattr(stand_in, name):
                name += "_"
            stand_in._buffers[name] = as_tensor(value)
            held[name] = key
            _set_number(stand_in, key, AnyNumber(name))
    _HELD[stand_in] = held
    start_again(stand_in)
    return {name: stand_in._buffers[name] for name in held}  # type: ignore[misc]


def held_by(stand_in: nn.Module) -> Mapping[str, NumberKey]:
    """Return the places whose numbers ``stand_in`` holds, by the names of their buffers."""
    return _HELD.get(stand_in, {})


def start_again(stand_in: nn.Module) -> None:
    """Set the places to the numbers that they had before any forward of ``stand_in`` ran."""
    for name, key in held_by(stand_in).items():
        buffer = stand_in._buffers[name]
        assert buffer is not None
        _set_number(stand_in, key, buffer.item())


@contextmanager
def numbers_marked(stand_in: nn.Module) -> Iterator[None]:
    """Within the context, containers hold an :class:`AnyNumber` in place of each held number."""
    inside = {name: key for name, key in held_by(stand_in).items() if len(key) > 2}
    before = {name: _number(stand_in, key) for name, key in inside.items()}
    for name, key in inside.items():
        _set_number(stand_in, key, AnyNumber(name))
    try:
        yield
    finally:
        for name, key in inside.items():
            _set_number(stand_in, key, before[name])


def _number(module: nn.Module, key: NumberKey) -> Any:
    return number_in(module.get_submodule(key[0]), key[1:])


def _set_number(module: nn.Module, key: NumberKey, number: Any) -> None:
    set_number_in(module.get_submodule(key[0]), key[1:], number)


class HeldOfCall:
    """The held numbers of one traced call of a stand-in.

    - ``ranges``: the values for which the trace holds, by the name of a buffer.
    - ``ways``: how forward changes these numbers, once it has returned.
    """

    def __init__(self, stand_in: nn.Module) -> None:
        self._stand_in = stand_in
        self._held = held_by(stand_in)
        self._leaves = {name: -1 - i for i, name in enumerate(self._held)}
        self.ranges: dict[str, NumberRange] = {}
        self.ways: dict[NumberKey, Left] = {}
        for name, key in self._held.items():
            value = _number(stand_in, key)
            self.ranges[name] = NumberRange(type(value), sample=value)

    def by_leaf(self) -> dict[int, NumberRange]:
        """Return the ranges by the numbers -1, -2, ..., one for each place.

        Leaves of the arguments have the numbers 0, 1, ... in the same dictionaries.
        """
        return {self._leaves[name]: known for name, known in self.ranges.items()}

    def keys(self, leaves: Collection[int]) -> frozenset[NumberKey]:
        """Return the places whose negative numbers (see :meth:`by_leaf`) are in ``leaves``."""
        return frozenset(self._held[n] for n, leaf in self._leaves.items() if leaf in leaves)

    @contextmanager
    def in_attributes(self, of: NumbersOfCall) -> Iterator[None]:
        """Set the places to traced numbers in this context, and to their old values after it.

        Raises:
            NumberReadError: forward has assigned a value that is not computed from these numbers.
        """
        before: dict[str, float] = {}
        containers = self._containers()
        for name, key in self._held.items():
            before[name], tensor = _number(self._stand_in, key), self._stand_in._buffers[name]
            assert tensor is not None
            _set_number(self._stand_in, key, of.traced(self._leaves[name], tensor))
        left: dict[str, object] = {}
        replaced: list[str] = []
        try:
            yield
        finally:
            now = self._containers()
            replaced += [name for name in now if now[name] is not containers[name]]
            for name, key in self._held.items():
                left[name] = _number(self._stand_in, key)
                _set_number(self._stand_in, key, before[name])
        for name in replaced:
            what = f"forward replaces what holds {label_of(self._held[name])}"
            raise NumberReadError(what, frozenset({self._leaves[name]}))
        for name in self._held:
            self._note(name, left.pop(name))

    def _containers(self) -> dict[str, Any]:
        owners = {key: self._stand_in.get_submodule(key[0]) for key in self._held.values()}
        return {name: container_of(owners[key], key[1:]) for name, key in self._held.items()}

    def _note(self, name: str, value: object) -> None:
        leaf, key = self._leaves[name], self._held[name]
        if type(value) is TracedNumber and self.keys(value.leaves) == {key} and value.shift == 0:
            return
        if not is_set_plainly(self._containers()[name]):
            raise NumberReadError(f"forward assigns to {label_of(key)}", frozenset({leaf}))
        if is_number(value):
            self.ways[key] = Left(number=partial(_always, value))
        elif type(value) is TracedNumber and value.computed is not None:
            of = self.keys(value.leaves)
            if not of:
                raise value.refused("keeps it in an attribute")
            self.ways[key] = Left(number=value.computed, of=next(iter(of)))
        else:
            raise NumberReadError(f"forward assigns to {label_of(key)}", frozenset({leaf}))


def _always(value: Any, before: Any) -> Any:
    return value
