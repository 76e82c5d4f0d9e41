"""The guard of values: whether attributes and other values that forward reads are unchanged."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from tvmbridge.calls.copies import copied_values
from tvmbridge.calls.standins import StandsForForward
from tvmbridge.core.assumptions import Holder, OutsideValue
from tvmbridge.core.contents import (
    ANY_TENSOR,
    CONTAINERS,
    DEPTH,
    MISSING,
    PartOf,
    Passed,
    all_held,
    deeper,
    is_constant,
    is_flat,
    may_grow,
    same_value,
    state_of,
)
from tvmbridge.core.number_places import numbers_changed
from tvmbridge.core.states import StateOf
from tvmbridge.core.types import NumberKey
from tvmbridge.graph_capture.observe.attributes import own_names
from tvmbridge.graph_capture.observe.data import is_of_users
from tvmbridge.runtime.guards.class_entries import ClassEntries, registered_names
from tvmbridge.runtime.guards.forwards import stands_for
from tvmbridge.runtime.guards.holding import (
    Beyond,
    Container,
    WatchedPart,
    WatchedState,
)


class _Names:
    """Looks up the attribute names of a module, for a forward that reads its ``__dict__``."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner

    def get(self, name: str, default: Any) -> Any:
        held = vars(self.owner).items()
        # Names that a dispatch of methods has added; the stand-in that is traced has none of them.
        added = {n for n, v in held if isinstance(v, StandsForForward) and v.own is None}
        return own_names(self.owner) - added


class _Watched:
    """One watched value: its place, its expected value, and data for a quick comparison.

    Args:
        owner: the module or class whose attribute it is; None: it is looked up in ``holder``.
        label: the name of the value in messages.
        holder: the mapping to look the value up in; None: the owner's ``__dict__``.
        itself: whether identity is compared; otherwise the contents are.
    """

    def __init__(
        self,
        owner: nn.Module | type[nn.Module] | None,
        name: str,
        label: str,
        expected: Any,
        *,
        holder: Holder | None = None,
        itself: bool = False,
    ) -> None:
        self.owner = owner
        if holder is None and isinstance(owner, nn.Module) and name == "__dict__":
            holder = _Names(owner)
        self.holder: Holder = owner.__dict__ if holder is None else holder
        self.itself = itself
        self.name = name
        self.label = label
        self.expected = expected
        # The value at the last full comparison, and the containers in it with the expected parts.
        self.last: Any = self
        self.held: list[tuple[Any, Any]] = []
        # Whether each call replaces the value, which may hold a graph of autograd.
        self._is_carried = type(expected) in (tuple, list, dict) and any(
            held is ANY_TENSOR for held in all_held(expected)
        )

    def changed(self) -> bool:
        """Compare the value in full; if it is unchanged, store data for quick comparisons."""
        value = found = self.holder.get(self.name, MISSING)
        if isinstance(value, StandsForForward):  # a method that is dispatched
            value = stands_for(value)
        if self.itself:
            self.last = found
            return value is not self.expected
        if not same_value(value, self.expected):
            return True
        if self._is_carried:
            return False
        self.held = []
        self._hold(value, self.expected, DEPTH, {})
        self.last = found
        return False

    def numbers(self) -> list[NumberKey] | None:
        """Return the steps to each number that has changed; None if more has changed."""
        return numbers_changed(self.holder.get(self.name, MISSING), self.expected)

    def of_copy(self, memo: Mapping[int, Any]) -> _Watched:
        """Return the watched value of a module's deep copy, by the ``memo`` of copy.deepcopy."""
        owner = memo.get(id(self.owner))
        if owner is None:  # a class, or a place outside of modules, is not copied
            return _Watched(
                self.owner,
                self.name,
                self.label,
                self.expected,
                holder=self.holder,
                itself=self.itself,
            )
        # Tensors that the expected value holds have been copied with the module.
        expected = copy.deepcopy(self.expected, dict(memo))
        return _Watched(owner, self.name, self.label, expected)

    def _hold(self, value: Any, expected: Any, depth: float, passed: Passed) -> None:
        pair = id(value), id(expected)
        if depth <= 0 or (pair in passed and passed[pair][0] >= depth):
            return
        passed[pair] = depth, value, expected
        if isinstance(expected, StateOf):
            self.held += [(value, expected)] if expected.state is not None else []
            return
        if isinstance(expected, PartOf):
            self.held.append((value, expected))
            for name, each in expected.attributes.items():
                self._hold(expected.found(value, name), each, depth, passed)
            return
        if is_flat(value):
            self.held += [(value, None)] if type(value) is not tuple else []
            return
        held = state_of(value)
        if held is None or not (held or may_grow(value)):
            return
        if not isinstance(value, tuple | frozenset):
            self.held.append((value, None))
        for item, each in zip(held, state_of(expected) or [], strict=False):
            self._hold(item, each, deeper(value, depth), passed)


def _of_class(cls: type[nn.Module], name: str, label: str) -> list[_Watched]:
    """Watch what forward reads in a class because the instance has none.

    Data is watched itself, and methods are watched elsewhere. An attribute of a class earlier in
    the method resolution order would hide either. PyTorch's classes have no data of users.
    """
    classes = cls.__mro__
    place = next((i for i, c in enumerate(classes) if name in c.__dict__), None)
    own = [c for c in classes[:place] if is_of_users(c)]
    hidden = [_Watched(c, name, label, MISSING) for c in own]
    if place is None or classes[place].__module__.startswith("torch."):
        return hidden
    value = classes[place].__dict__[name]
    if not is_constant(value) and not isinstance(value, CONTAINERS):
        return hidden
    # Tensors in a container stay themselves: they are inputs of compiled code.
    return [*hidden, _Watched(classes[place], name, label, copied_values({0: value})[0])]


class ValueGuard:
    """Checks that the values that forward read during capture are unchanged.

    What forward reads of a user's objects is compared at any depth. The contents of other objects
    are compared to a depth of four; deeper changes are not noticed.
    """

    def __init__(self, watched: list[_Watched], classes: ClassEntries) -> None:
        self._watched = watched
        self._classes = classes
        self._refresh()

    @classmethod
    def of(
        cls,
        module: nn.Module,
        expected: Mapping[tuple[str, str], Any],
        outside: Iterable[OutsideValue] = (),
    ) -> ValueGuard:
        """Return a guard of ``module``'s attributes and of other values that forward reads.

        Args:
            expected: values by (submodule's name, attribute's name), as :func:`values_read`
                returns them; mutable objects among them must be copies.
        """
        watched: dict[tuple[int, str], _Watched] = {}
        for (path, name), value in expected.items():
            owner = module.get_submodule(path)
            label = f"the attribute {path}.{name}".replace(" .", " ")
            found = [_Watched(owner, name, label, value)]
            if value is MISSING:
                found += _of_class(type(owner), name, label)
            for each in found:
                watched.setdefault((id(each.owner), name), each)
        beside = [
            _Watched(
                v.owner,
                v.name,
                f"{v.label} outside of the module",
                v.expected,
                holder=v.holder,
                itself=v.itself,
            )
            for v in outside
        ]
        classes = ClassEntries()
        held: dict[str, list[str]] = {}
        for (path, name), value in expected.items():
            if value is not MISSING:
                held.setdefault(path, []).append(name)
        for path, each_module in module.named_modules():
            classes.add(type(each_module), held.get(path, []), registered_names(each_module))
        guard = cls([*watched.values(), *beside], classes)
        for part in guard._parts:
            if not part.part.asks:
                classes.add(part.part.kind, part.part.attributes)
        return guard

    def rebound(self, memo: Mapping[int, Any]) -> ValueGuard:
        """Return a guard with the same expectations for a deep copy of the module.

        ``memo`` is the memo of :func:`copy.deepcopy`.
        """
        return ValueGuard([watched.of_copy(memo) for watched in self._watched], self._classes)

    def _refresh(self) -> None:
        for watched in self._watched:
            watched.changed()
        self._slots = [(w.holder, w.name, w.last, w) for w in self._watched]
        containers: dict[int, Container | WatchedState] = {}
        parts: dict[int, WatchedPart] = {}
        for watched in self._watched:
            for value, part in watched.held:
                # Many submodules often share one configuration object, so it is compared once.
                if part is None:
                    containers.setdefault(id(value), Container(value)).watched.append(watched)
                    continue
                if isinstance(part, StateOf):
                    state = WatchedState(value, part)
                    containers.setdefault(id(value), state).watched.append(watched)
                    continue
                held = parts.setdefault(id(value), WatchedPart(value, part))
                held.add(part)
                held.watched.append(watched)
        self._containers = list(containers.values())
        self._parts = list(parts.values())

    def beyond(self, watched: Collection[int]) -> Beyond:
        """Return what a fast guard has to compare in addition to dictionaries it watches.

        ``watched`` are the ids of these dictionaries.
        """
        slots = [(h, n, v) for h, n, v, _ in self._slots if id(h) not in watched]
        names = [h.owner.__dict__ for h, *_ in slots if isinstance(h, _Names)]
        dicts = [c.dictionary for c in self._containers if c.dictionary is not None]
        holding: list[Container | WatchedPart | WatchedState] = [*self._parts, *self._containers]
        return Beyond(
            dicts=[*names, *dicts],
            places=[place for p in self._parts if not p.part.asks for place in p.places()],
            slots=[slot for slot in slots if not isinstance(slot[0], _Names)],
            containers=[
                *(c for c in self._containers if c.dictionary is None),
                *(p for p in self._parts if p.has_slots),
            ],
            asked=[
                *(
                    (vars(p.value), p.holds, None)
                    for p in self._parts
                    if p.part.asks and not p.has_slots
                ),
                *self._classes.asked(),
            ],
            objects=[each.value for each in holding if each.has_dict],
        )

    def changed(self) -> str | None:
        """Return the name of a value that has changed; None if none has."""
        if hiding := self._classes.changed():
            return hiding
        suspects = [w for d, name, last, w in self._slots if d.get(name, MISSING) is not last]
        holding: list[Container | WatchedPart | WatchedState] = [*self._containers, *self._parts]
        for container in holding:
            if container.changed():
                suspects += container.watched
        if not suspects:
            return None
        for watched in suspects:
            if watched.changed():
                return watched.label
        self._refresh()
        return None

    def is_number_changed(self) -> bool:
        """Whether a value that is a number has changed to another number."""
        return any(w.numbers() for w in self._watched if w.changed())

    def numbers_changed(self) -> list[tuple[Any, NumberKey]]:
        """Return the owners and places of numbers in attributes that have changed.

        Return none if a value that is no number has changed too.
        """
        found: list[tuple[Any, NumberKey]] = []
        for watched in [w for w in self._watched if w.changed()]:
            places = watched.numbers()
            if places is None:
                return []
            if isinstance(watched.owner, nn.Module):
                found += [(watched.owner, (watched.name, *steps)) for steps in places]
        return found
