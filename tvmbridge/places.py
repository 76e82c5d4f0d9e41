"""Places: where the names that a function mentions are found, and what is found there."""

from __future__ import annotations

import gc
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tvmbridge.contents import MISSING, is_constant
from tvmbridge.executed import Executed
from tvmbridge.mentions import Mention, Origin, absolute
from tvmbridge.reads import Holder

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


@dataclass(frozen=True)
class Place:
    """Where a value was found: in the ``holder`` of an owner, under a name."""

    owner: Any
    holder: Holder
    name: str
    label: str
    value: Any

    @property
    def key(self) -> tuple[int, str]:
        """The same for two ways to one place."""
        return id(self.owner), self.name


def places(executed: Executed, mention: Mention) -> list[Place]:
    """The places that a mention leads past, as far as they can be told; the last is meant."""
    start = _start(executed, mention)
    return [] if start is None else list(_along(start, mention.attributes))


def _start(executed: Executed, mention: Mention) -> Place | None:
    name = mention.name
    holder: Holder | None = executed.globals
    if mention.origin is Origin.FREE:
        holder = _cells(executed, name)
    elif mention.origin is Origin.MODULE:
        name = absolute(name, executed.globals.get("__package__"))
        holder = sys.modules
    value = MISSING if holder is None else holder.get(name, MISSING)
    if holder is None or value is MISSING:
        return None
    owner = holder.cell(name) if isinstance(holder, _Cells) else holder
    return Place(owner, holder, name, name, value)


def _cells(executed: Executed, name: str) -> Holder | None:
    """The cells in which the free variables of a function lie that has ``name`` among them."""
    value = executed.free.get(name, MISSING)
    if name == "__class__" or isinstance(value, (type, *_FUNCTIONS)):
        return None
    for function in gc.get_referrers(executed.code):
        if not isinstance(function, types.FunctionType) or function.__closure__ is None:
            continue
        cells = _Cells(executed.code.co_freevars, function.__closure__)
        if all(cells.get(n, MISSING) is v for n, v in executed.free.items()):
            return cells
    return None


def _along(place: Place, attributes: tuple[str, ...]) -> Iterator[Place]:
    """The places that a mention leads past, as far as they can be told."""
    yield place
    for attribute in attributes:
        following = _attribute(place, attribute)
        if following is None:
            return
        yield following
        place = following


def _attribute(place: Place, name: str) -> Place | None:
    """Where ``name`` of the object at ``place`` is, if it is no matter of its class's code."""
    owner, label = place.value, f"{place.label}.{name}"
    holder: Holder
    if isinstance(owner, types.ModuleType) and name in vars(owner):
        holder = vars(owner)
    elif _is_backend(owner) or isinstance(owner, threading.local):
        holder = _Attributes(owner)
    elif isinstance(owner, type):
        owner = next((c for c in owner.__mro__ if name in c.__dict__), None)
        if owner is None:
            return None
        holder = owner.__dict__
    elif is_constant(owner) or isinstance(owner, torch.Tensor):
        return None
    elif name in (getattr(owner, "__dict__", None) or {}):
        holder = vars(owner)
    else:
        return None
    value = holder.get(name, MISSING)
    return None if value is MISSING else Place(owner, holder, name, label, value)


def _is_backend(value: Any) -> bool:
    """Whether ``value`` has settings of PyTorch for attributes, which its class looks up."""
    place = value.__name__ if isinstance(value, types.ModuleType) else type(value).__module__
    return place.startswith("torch.backends")


class _Cells:
    """The free variables of a function."""

    def __init__(self, names: tuple[str, ...], cells: tuple[types.CellType, ...]) -> None:
        self._cells = dict(zip(names, cells, strict=True))

    def cell(self, name: str) -> types.CellType:
        """The cell of one of them, which other functions may share."""
        return self._cells[name]

    def get(self, name: str, default: Any) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:  # It is empty.
            return default


class _Attributes:
    """Attributes that are in no dict, or in another one for each thread."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def get(self, name: str, default: Any) -> Any:
        return getattr(self._owner, name, default)
