"""What watched values hold: containers and plain objects, and whether they hold it still."""

from __future__ import annotations

import operator
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
from tvmbridge.runtime.guards.watch import Asked, Place


class Container:
    """A container or plain object, and what it held: the same objects under the same keys?"""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.watched: list[Any] = []
        self._read = _reader(value)
        now = self._read(value)
        self._keys = list(now) if isinstance(now, dict) else None
        self._held = list(now if self._keys is None else now.values())
        # What is made anew for each look is compared by value.
        self._same = same_value if self._read is state_of else operator.is_
        # What holds all of it, where that is one dictionary.
        self.dictionary: dict[Any, Any] | None = None
        if type(value) is dict or self._read is vars:
            self.dictionary = now

    def changed(self) -> bool:
        now = self._read(self.value)
        if len(now) != len(self._held):
            return True
        if self._keys is None:
            return not all(map(self._same, now, self._held))
        return list(now) != self._keys or not all(map(operator.is_, now.values(), self._held))


class WatchedPart:
    """A plain object of which a part matters, and that part: the same objects under the names?"""

    def __init__(self, value: Any, part: PartOf) -> None:
        self.value = value
        self.watched: list[Any] = []
        self.part = part
        self._found: dict[str, Any] = {}
        self.add(part)

    def add(self, part: PartOf) -> None:
        """Look at the attributes of ``part`` too, another part of the same object."""
        self._found.update((n, part.found(self.value, n)) for n in part.attributes)

    def places(self) -> list[Place]:
        """The entries of its dictionary that matter, where they are what its class reads."""
        return [(vars(self.value), name, value) for name, value in self._found.items()]

    def changed(self) -> bool:
        return type(self.value) is not self.part.kind or not all(
            _is_still(self.part.found(self.value, name), then) for name, then in self._found.items()
        )

    def holds(self) -> bool:
        """Whether it is as it was."""
        return not self.changed()


def _is_still(now: Any, then: Any) -> bool:
    """Whether a value is the same object, or the same constant made anew."""
    return now is then or (is_constant(then) and same_value(now, then))


# Where a value is looked up, its name, and the object that it was.
Slot: TypeAlias = tuple[Any, str, Any]


@dataclass(frozen=True)
class Beyond:
    """What a fast guard looks at beside the dictionaries that it watches anyway.

    dicts: further dictionaries, as a whole.
    places: entries of dictionaries of which others do not matter.
    slots: places to be compared by identity at each call.
    containers: what has no dictionary of its own.
    asked: dictionaries, with functions that say whether what matters in them has changed.
    objects: whose class must be what it is.
    """

    dicts: list[dict[Any, Any]]
    places: list[Place]
    slots: list[Slot]
    containers: list[Container]
    asked: list[Asked]
    objects: list[Any]


def _reader(value: Any) -> Callable[[Any], Any]:
    """How to look at what ``value`` holds, as a list or a dict, at the least cost."""
    if type(value) in (list, dict):
        return lambda same: same
    if isinstance(value, CONTAINERS):
        return contents
    if not hasattr(value, "__dict__") or isinstance(value, numpy.ndarray):
        return state_of
    return attributes_of if slots_of(type(value)) else vars  # type: ignore[arg-type]
