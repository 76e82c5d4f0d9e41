"""Attributes: which of them forward reads, which it writes, and whether they are as they were.

Compiled code has the numbers, strings and containers that forward read in it as constants. So the
reads are recorded while forward is traced, and the values compared at each call.
"""

from __future__ import annotations

import copy
import enum
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn

from tvmbridge.contents import (
    CONTAINERS,
    DEPTH,
    attributes_of,
    contents,
    is_constant,
    may_grow,
    same_value,
    slots_of,
    state_of,
)
from tvmbridge.foreign import ForeignModules
from tvmbridge.libraries import BOOKKEEPING
from tvmbridge.patches import patched_here

MISSING: Any = enum.Enum("Missing", "MISSING").MISSING  # type: ignore[attr-defined]

_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) | {
    "forward",
    "call_super_init",
    "dump_patches",
    "_compiled_call_impl",  # of Module.compile(): the same forward by torch.compile
}


@contextmanager
def recorded_reads(
    module: nn.Module, foreign: ForeignModules | None = None
) -> Iterator[set[tuple[str, str]]]:
    """Collects the attributes that are read meanwhile, as (submodule's name, attribute's name).

    Parameters, buffers, submodules and methods are left out. Who looks at ``__dict__`` itself, as
    ``vars`` does, reads everything in it. What is read of other modules is told to ``foreign``.
    """
    names = {id(m): name for name, m in module.named_modules(remove_duplicate=False)}
    reads: set[tuple[str, str]] = set()

    def read(genuine: Callable[..., Any], owner: nn.Module, attribute: str) -> Any:
        name = names.get(id(owner))
        if name is None and foreign is not None:
            foreign.note(owner, attribute)
        if name is None or attribute in _OF_EVERY_MODULE:
            return genuine(owner, attribute)
        if attribute == "__dict__":
            attributes: dict[str, Any] = genuine(owner, "__dict__")
            if not _called_by_torch():
                reads.update((name, a) for a in attributes if a not in _OF_EVERY_MODULE)
            return attributes
        if not attribute.startswith("__"):
            reads.add((name, attribute))
        return genuine(owner, attribute)

    with patched_here(nn.Module, "__getattribute__", read):
        yield reads


@contextmanager
def recorded_assignments(
    module: nn.Module, reads: set[tuple[str, str]]
) -> Iterator[set[tuple[str, str]]]:
    """Collects the attributes that are assigned meanwhile and had not been read before that.

    What is read of them afterwards is no state of the module: the one who assigned it reads it.

    Args:
        module: as for :func:`recorded_reads`.
        reads: what that one collects at the same time.
    """
    names = {id(m): name for name, m in module.named_modules(remove_duplicate=False)}
    assigned: set[tuple[str, str]] = set()

    def write(genuine: Callable[..., None], owner: nn.Module, attribute: str, value: Any) -> None:
        key = names.get(id(owner), ""), attribute
        if id(owner) in names and attribute not in _OF_EVERY_MODULE and key not in reads:
            assigned.add(key)
        genuine(owner, attribute, value)

    with patched_here(nn.Module, "__setattr__", write):
        yield assigned


def values_assigned(
    module: nn.Module, assigned: set[tuple[str, str]]
) -> dict[tuple[str, str], Any]:
    """The attributes of ``assigned`` whose values are plain and cannot change, with the values."""
    values: dict[tuple[str, str], Any] = {}
    for name, attribute in assigned:
        held = module.get_submodule(name).__dict__
        if attribute not in BOOKKEEPING and is_constant(held.get(attribute, MISSING)):
            values[name, attribute] = held[attribute]
    return values


def _called_by_torch() -> bool:
    # This function, read, the patch's call and its stub stand before the one who asked.
    caller = sys._getframe(4).f_globals.get("__name__", "")
    return caller.startswith(("torch.", "tvmbridge.", "copy"))


def values_read(module: nn.Module, reads: set[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """The attributes of ``reads`` that are data, with their values; MISSING: there is none.

    Tensors are left out: they are inputs of the compiled code, or constants that are watched.
    """
    values: dict[tuple[str, str], Any] = {}
    for name, attribute in reads:
        owner = module.get_submodule(name)
        if attribute in BOOKKEEPING or any(
            attribute in d for d in (owner._parameters, owner._buffers, owner._modules)
        ):
            continue
        value = owner.__dict__.get(attribute, MISSING)
        if not isinstance(value, torch.Tensor):
            values[name, attribute] = value
    return values


class _Watched:
    """One attribute: where it is, what it was, and quick signs that it is the same still."""

    def __init__(
        self, owner: nn.Module | type[nn.Module], name: str, label: str, expected: Any
    ) -> None:
        self.owner = owner
        self.attributes: Mapping[str, Any] = owner.__dict__
        self.name = name
        self.label = label
        self.expected = expected
        # The value at the last full comparison, and the containers in it.
        self.last: Any = self
        self.held: list[Any] = []

    def changed(self) -> bool:
        """A full comparison; remembers the signs if nothing that matters changed."""
        value = self.attributes.get(self.name, MISSING)
        if not same_value(value, self.expected):
            return True
        self.held = []
        self._hold(value, DEPTH)
        self.last = value
        return False

    def _hold(self, value: Any, depth: int) -> None:
        held = state_of(value)
        if depth == 0 or held is None or not (held or may_grow(value)):
            return
        if not isinstance(value, tuple | frozenset):
            self.held.append(value)
        for item in held:
            self._hold(item, depth - 1)


def _of_class(cls: type[nn.Module], name: str, label: str) -> list[_Watched]:
    """The attribute of a class that is read where its instance has none, if it is data.

    Classes that could come to hide it are watched too; those of PyTorch have no data of users.
    """
    classes = cls.__mro__
    place = next((i for i, c in enumerate(classes) if name in c.__dict__), None)
    if place is None or classes[place].__module__.startswith("torch."):
        return []
    value = classes[place].__dict__[name]
    if not is_constant(value) and not isinstance(value, CONTAINERS):
        return []
    hidden = [_Watched(c, name, label, MISSING) for c in classes[:place]]
    return [*hidden, _Watched(classes[place], name, label, copy.deepcopy(value))]


class _Holder:
    """A container or plain object, and what it held: the same objects under the same keys?"""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.watched: list[_Watched] = []
        self._read = _reader(value)
        now = self._read(value)
        self._keys = list(now) if isinstance(now, dict) else None
        self._held = list(now if self._keys is None else now.values())
        # What is made anew for each look is compared by value.
        self._same = same_value if self._read is state_of else operator.is_

    def changed(self) -> bool:
        now = self._read(self.value)
        if len(now) != len(self._held):
            return True
        if self._keys is None:
            return not all(map(self._same, now, self._held))
        return list(now) != self._keys or not all(map(operator.is_, now.values(), self._held))


def _reader(value: Any) -> Callable[[Any], Any]:
    """How to look at what ``value`` holds, as a list or a dict, at the least cost."""
    if type(value) in (list, dict):
        return lambda same: same
    if isinstance(value, CONTAINERS):
        return contents
    if not hasattr(value, "__dict__") or isinstance(value, numpy.ndarray):
        return state_of
    return attributes_of if slots_of(type(value)) else vars  # type: ignore[arg-type]


class AttributeGuard:
    """Says whether the attributes that forward read are as they were.

    What objects hold is looked at to a depth of four; deeper changes are not seen.
    """

    def __init__(self, watched: list[_Watched]) -> None:
        self._watched = watched
        self._refresh()

    @classmethod
    def of(cls, module: nn.Module, expected: Mapping[tuple[str, str], Any]) -> AttributeGuard:
        """A guard of ``module``'s attributes.

        Args:
            module: the dispatched module.
            expected: values by (submodule's name, attribute's name), as :func:`values_read` has
                them; objects among them must be copies, which no change reaches.
        """
        watched: dict[tuple[int, str], _Watched] = {}
        for (path, name), value in expected.items():
            owner, label = module.get_submodule(path), f"{path}.{name}".lstrip(".")
            found = [_Watched(owner, name, label, value)]
            if value is MISSING:
                found += _of_class(type(owner), name, label)
            for each in found:
                watched.setdefault((id(each.owner), name), each)
        return cls(list(watched.values()))

    def rebound(self, memo: Mapping[int, Any]) -> AttributeGuard:
        """The same expectations of a deep copy of the module, found through the copy's memo."""
        # Tensors that the expected values hold have been copied with the module.
        return AttributeGuard(
            [
                _Watched(
                    memo.get(id(w.owner), w.owner),  # a class is its own copy
                    w.name,
                    w.label,
                    copy.deepcopy(w.expected, dict(memo)),
                )
                for w in self._watched
            ]
        )

    def _refresh(self) -> None:
        for watched in self._watched:
            watched.changed()
        self._slots = [(w.attributes, w.name, w.last, w) for w in self._watched]
        holders: dict[int, _Holder] = {}
        for watched in self._watched:
            for value in watched.held:
                # One configuration is often an attribute of many submodules.
                holders.setdefault(id(value), _Holder(value)).watched.append(watched)
        self._held = list(holders.values())

    def changed(self) -> str | None:
        """The name of an attribute that has another value now; None: there is none."""
        suspects = [w for d, name, last, w in self._slots if d.get(name, MISSING) is not last]
        for holder in self._held:
            if holder.changed():
                suspects += holder.watched
        if not suspects:
            return None
        for watched in suspects:
            if watched.changed():
                return watched.label
        self._refresh()
        return None
