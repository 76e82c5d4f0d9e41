"""Sources: where the values are that a function names: globals, free variables, attributes.

What the names lead to is found level by level: the attributes of modules, classes and functions
that have one of the names. Plain objects and containers are watched whole.
"""

from __future__ import annotations

import builtins
import gc
import importlib.util
import sys
import threading
import types
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tvmbridge.core.assumptions import Holder
from tvmbridge.core.contents import MISSING, all_held, is_constant
from tvmbridge.graph_capture.observe.data import is_data, is_object, is_of_users
from tvmbridge.graph_capture.observe.executed import Executed, is_library
from tvmbridge.graph_capture.trace.patches import unpatched


@dataclass(frozen=True)
class Source:
    """Where a value was found: in the ``holder`` of an owner, under a name."""

    owner: Any
    holder: Holder
    name: str
    label: str
    value: Any

    @property
    def key(self) -> tuple[int, str]:
        """The same for two ways to one value."""
        return id(self.owner), self.name

    def now(self) -> Any:
        """The value of now."""
        return self.holder.get(self.name, MISSING)

    def restore(self) -> None:
        """Let the name have the value again that it had."""
        if isinstance(self.holder, dict):
            self.holder[self.name] = self.value
            if self.value is MISSING:
                del self.holder[self.name]
        elif self.value is MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.value)


class Attributes:
    """Attributes that are in no dict, or in another one for each thread; what a cell holds."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def get(self, name: str, default: Any) -> Any:
        try:
            return getattr(self._owner, name, default)
        except (ValueError, RuntimeError):  # An empty cell; a setting that PyTorch refuses to read.
            return default


def roots(executed: Executed) -> Iterator[Source]:
    """Where a function's names begin: its globals, and modules that it imports.

    Where nothing has the name of a global, its value is MISSING.
    """
    names, space = executed.names, executed.globals
    for name in names.globals:
        holder = space if name in space or name not in vars(builtins) else vars(builtins)
        yield Source(holder, holder, name, name, holder.get(name, MISSING))
    package = space.get("__package__")
    modules = {
        importlib.util.resolve_name(m, package) for m in names.modules if package or m[0] != "."
    }
    # As for importlib.import_module.
    modules |= {s for s in names.strings if not is_library(s)}
    for name in modules & sys.modules.keys():
        yield Source(sys.modules, sys.modules, name, name, sys.modules[name])


def free_variables(executed: Executed) -> Iterator[Source]:
    """The free variables of a function that ran, in its cells.

    A frame does not tell which function it is of: its code and the values do.
    """
    functions = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
    free = {n: v for n, v in executed.free.items() if not isinstance(v, functions)}
    for function in gc.get_referrers(executed.code) if free else ():
        if not isinstance(function, types.FunctionType) or function.__code__ is not executed.code:
            continue
        cells = dict(zip(executed.code.co_freevars, function.__closure__ or (), strict=True))
        held = {n: Attributes(cells[n]) for n in free}
        if all(held[n].get("cell_contents", MISSING) is v for n, v in free.items()):
            for n, v in free.items():
                yield Source(cells[n], held[n], "cell_contents", n, v)
            return


def below(source: Source, names: Collection[str]) -> Iterator[Source]:
    """The attributes of the value at ``source`` that have one of the ``names``."""
    value = source.value
    held = attributes_below(value)
    for name in names if isinstance(held, Attributes) else (held or {}).keys() & names:
        inner = unpatched(held.get(name, MISSING), MISSING)
        if inner is not MISSING and name != "__name__" and _leads_on(value, inner):
            yield Source(value, held, name, f"{source.label}.{name}", inner)


def namespaces(source: Source) -> Iterator[Source]:
    """The users' namespaces that come with a value: its classes, those of what it holds, itself.

    Functions that it is given to look attributes of them up.
    """
    value = source.value
    whole = is_data(value) or is_object(value)
    classes = {type(held) for held in all_held(value)} if whole else {type(value)}
    if isinstance(value, type):
        classes = {value}
    elif attributes_below(value) is not None:
        named = "__name__" if isinstance(value, types.ModuleType) else "__module__"
        if isinstance(value, threading.local) or not is_library(getattr(value, named, None)):
            yield source
    for cls in dict.fromkeys(base for each in classes for base in each.__mro__):
        if is_of_users(cls):
            yield Source(cls, {}, "", cls.__name__, cls)


def attributes_below(value: Any) -> Any:
    """The attributes of ``value`` by name; None: it has none, or is watched whole."""
    if isinstance(value, type):
        return vars(value) if is_of_users(value) else None
    kind = value.__name__ if isinstance(value, types.ModuleType) else type(value).__module__
    # Their classes look settings of PyTorch up.
    if isinstance(value, threading.local) or str(kind).startswith("torch.backends"):
        return Attributes(value)
    held = getattr(value, "__dict__", None)
    if not isinstance(held, dict) or isinstance(value, (torch.Tensor, nn.Module)):
        return None
    return None if is_constant(value) or is_data(value) or is_object(value) else held


def _leads_on(owner: Any, value: Any) -> bool:
    """Libraries lead to their own submodules; what else they import has other names."""
    if not isinstance(owner, types.ModuleType) or not isinstance(value, types.ModuleType):
        return True
    return not is_library(owner.__name__) or value.__name__.startswith(f"{owner.__name__}.")
