"""Contents of watched values: whether containers and plain objects hold the same objects."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy

from tvmbridge.core.contents import (
    CONTAINERS,
    PartOf,
    attributes_of,
    contents,
    is_constant,
    same_value,
    slots_of,
    state_of,
)
from tvmbridge.core.states import StateOf
from tvmbridge.runtime.guards.watch import Asked, Place

# Objects of these classes have a state beside their ``__dict__``.
_WITH_STATE = (numpy.ndarray, random.Random)


class Container:
    """A container or plain object that must hold the same objects under the same keys.

    - ``value``: the container.
    - ``watched``: the watched values that it is part of.
    - ``dictionary``: the dictionary that holds all its contents; None if there is no such one.
    - ``has_dict``: whether this is the ``__dict__`` of the container.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.watched: list[Any] = []
        self._read = _reader(value)
        now = self._read(value)
        self._keys = list(now) if isinstance(now, dict) else None
        self._held = list(now if self._keys is None else now.values())
        # state_of returns new objects each time, so they are compared by value.
        self._same = same_value if self._read is state_of else operator.is_
        self.dictionary: dict[Any, Any] | None = None
        self.has_dict = self._read is vars
        if type(value) is dict or self.has_dict:
            self.dictionary = now

    def changed(self) -> bool:
        now = self._read(self.value)
        if len(now) != len(self._held):
            return True
        if self._keys is None:
            return not all(map(self._same, now, self._held))
        return list(now) != self._keys or not all(map(operator.is_, now.values(), self._held))


class WatchedState:
    """An object whose methods must return the expected state.

    - ``value``: the object.
    - ``watched``: the watched values that it is part of.
    - ``expected``: its class and its state.
    """

    dictionary = None
    has_dict = False

    def __init__(self, value: Any, expected: StateOf) -> None:
        self.value = value
        self.watched: list[Any] = []
        self.expected = expected

    def changed(self) -> bool:
        return not same_value(self.value, self.expected)


class WatchedPart:
    """A plain object, some of whose attributes must hold the same objects.

    - ``value``: the object.
    - ``watched``: the watched values that it is part of.
    - ``part``: the class of the object and the attributes that matter.
    - ``has_dict``: whether the object has a ``__dict__``.
    """

    def __init__(self, value: Any, part: PartOf) -> None:
        self.value = value
        self.watched: list[Any] = []
        self.part = part
        self.has_dict = hasattr(value, "__dict__")
        self._found: dict[str, Any] = {}
        self.add(part)

    def add(self, part: PartOf) -> None:
        """Compare the attributes of ``part`` as well, another part of the same object."""
        self._found.update((n, part.found(self.value, n)) for n in part.attributes)

    def places(self) -> list[Place]:
        """Return the entries of the object's ``__dict__`` that matter, for a plain class."""
        return [(vars(self.value), name, value) for name, value in self._found.items()]

    @property
    def has_slots(self) -> bool:
        """Whether a dictionary does not show all changes."""
        return bool(slots_of(self.part.kind))

    def changed(self) -> bool:
        return type(self.value) is not self.part.kind or not all(
            _is_still(self.part.found(self.value, name), then) for name, then in self._found.items()
        )

    def holds(self) -> bool:
        """Whether the attributes are unchanged."""
        return not self.changed()


def _is_still(now: Any, then: Any) -> bool:
    """Whether ``now`` is the same object as ``then``, or an equal constant."""
    return now is then or (is_constant(then) and same_value(now, then))


# The mapping in which a value is looked up, its name, and the expected object.
Slot: TypeAlias = tuple[Any, str, Any]


@dataclass(frozen=True)
class Beyond:
    """The values that a fast guard compares in addition to the module's structure.

    - ``dicts``: further dictionaries, compared as a whole.
    - ``places``: single entries of dictionaries in which other entries do not matter.
    - ``slots``: values that are looked up and compared by identity at each call.
    - ``containers``: containers without a dictionary, such as lists, and objects with slots.
    - ``asked``: dictionaries, each with a function that compares the entries that matter.
    - ``objects``: objects of which the class and the ``__dict__`` must stay the same.
    """

    dicts: list[dict[Any, Any]]
    places: list[Place]
    slots: list[Slot]
    containers: list[Container | WatchedState | WatchedPart]
    asked: list[Asked]
    objects: list[Any]


def _reader(value: Any) -> Callable[[Any], Any]:
    """Return the cheapest function that returns the contents of ``value`` as a list or a dict."""
    if type(value) in (list, dict):
        return lambda same: same
    if isinstance(value, CONTAINERS):
        return contents
    if not hasattr(value, "__dict__") or isinstance(value, _WITH_STATE):
        return state_of
    return attributes_of if slots_of(type(value)) else vars  # type: ignore[arg-type]
