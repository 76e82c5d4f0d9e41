"""Places: where the names that a function mentions are found, and what is found there."""

from __future__ import annotations

import builtins
import gc
import inspect
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tvmbridge.core.assumptions import Holder
from tvmbridge.core.contents import MISSING, is_constant
from tvmbridge.graph_capture.observe.executed import Executed
from tvmbridge.graph_capture.observe.mentions import Ending, Mention, Origin, absolute

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
    """The places that a mention leads past, as far as they can be told; the last is meant.

    Where nothing has the name of a global, or of what is to be written, its value is MISSING.
    """
    start = _start(executed, mention)
    found = [] if start is None else list(_along(start, mention.attributes))
    if found and mention.ending is Ending.WRITTEN and len(found) == len(mention.attributes):
        owner, name = found[-1], mention.attributes[-1]
        if isinstance(getattr(owner.value, "__dict__", None), Mapping):
            label = f"{owner.label}.{name}"
            found.append(Place(owner.value, vars(owner.value), name, label, MISSING))
    return found


def _start(executed: Executed, mention: Mention) -> Place | None:
    name = mention.name
    holder: Any = executed.globals
    if mention.origin is Origin.FREE:
        if name == "__class__" or isinstance(executed.free.get(name), (type, *_FUNCTIONS)):
            return None
        holder = Cells(executed)
    elif mention.origin is Origin.MODULE:
        name = absolute(name, executed.globals.get("__package__"))
        holder = sys.modules
    elif name not in holder and name in vars(builtins):
        holder = vars(builtins)
    value = holder.get(name, MISSING)
    if value is MISSING and mention.origin is not Origin.GLOBAL:
        return None
    return Place(holder, holder, name, name, value)


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
        holder = Attributes(owner)
    elif isinstance(owner, type):
        owner = next((c for c in owner.__mro__ if name in c.__dict__), None)
        if owner is None:
            return None
        holder = owner.__dict__
    elif is_constant(owner) or isinstance(owner, torch.Tensor):
        return None
    elif name in (getattr(owner, "__dict__", None) or {}):
        holder = vars(owner)
    elif not hasattr(inspect.getattr_static(type(owner), name, property()), "__get__"):
        holder = Attributes(owner)  # which its class has for all, until the object has its own
    else:
        return None
    value = holder.get(name, MISSING)
    return None if value is MISSING else Place(owner, holder, name, label, value)


def _is_backend(value: Any) -> bool:
    """Whether ``value`` has settings of PyTorch for attributes, which its class looks up."""
    place = value.__name__ if isinstance(value, types.ModuleType) else type(value).__module__
    return place.startswith("torch.backends")


class Cells:
    """The free variables of a function that ran.

    Which function that was is not known from its code: :func:`bind` finds it.
    """

    def __init__(self, executed: Executed) -> None:
        self._executed = executed
        self._cells: dict[str, types.CellType] = {}

    def get(self, name: str, default: Any) -> Any:
        if not self._cells:
            return self._executed.free.get(name, default)
        try:
            return self._cells[name].cell_contents
        except ValueError:  # It is empty.
            return default

    def _take(self, function: types.FunctionType) -> bool:
        """Look at ``function`` from now on, if it is the one."""
        executed = self._executed
        if function.__code__ is not executed.code:
            return False
        self._cells = dict(zip(executed.code.co_freevars, function.__closure__ or (), strict=True))
        if all(self.get(name, MISSING) is value for name, value in executed.free.items()):
            return True
        self._cells = {}
        return False


def bind(cells: Sequence[Cells]) -> list[str]:
    """Find the functions that free variables are of; the names of those that have changed since."""
    if not cells:
        return []
    referrers = gc.get_referrers(*{id(c._executed.code): c._executed.code for c in cells}.values())
    functions = [f for f in referrers if isinstance(f, types.FunctionType)]
    lost = [c._executed.free for c in cells if not any(map(c._take, functions))]
    return [name for free in lost for name in free]


class Attributes:
    """Attributes that are in no dict, in another one for each thread, or in that of the class."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def get(self, name: str, default: Any) -> Any:
        return getattr(self._owner, name, default)
