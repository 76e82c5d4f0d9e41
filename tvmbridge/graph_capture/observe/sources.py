"""Sources: find the values that a function names in globals, free variables and attributes.

The search goes level by level. From a module, class or function it goes on to the attributes that
have one of the names. Plain objects and containers are compared as a whole.
"""

from __future__ import annotations

import builtins
import functools
import gc
import importlib.util
import sys
import threading
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tvmbridge.calls.patches import unpatched
from tvmbridge.core.assumptions import Holder
from tvmbridge.core.contents import MISSING, all_held, is_constant, slots_of
from tvmbridge.core.errors import CaptureError
from tvmbridge.core.states import is_weak, referent
from tvmbridge.graph_capture.observe.closures import Closures
from tvmbridge.graph_capture.observe.data import is_data, is_object, is_of_users
from tvmbridge.graph_capture.observe.executed import Executed, is_library

# Containers with more entries are no registries of functions.
LARGEST_REGISTRY = 64
_BOUND: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__self__",),
    functools.partial: ("func", "args", "keywords"),
}
_CONTAINERS = (dict, list, tuple, deque)
_LEADING = (type, types.FunctionType, *_BOUND, *_CONTAINERS)


@dataclass(frozen=True)
class Source:
    """The place where a value was found.

    - ``owner``: the object that the value belongs to, such as a Python module or a class.
    - ``holder``: the owner's names and values, looked up by ``get``.
    - ``name``: the name of the value in the holder.
    - ``label``: the name for messages.
    - ``value``: the value when it was found; MISSING if there was none.
    """

    owner: Any
    holder: Holder
    name: str
    label: str
    value: Any

    @property
    def key(self) -> tuple[int, str]:
        """A key that is equal for all paths that lead to the same place."""
        return id(self.owner), self.name

    def now(self) -> Any:
        """Return the current value at this place."""
        return self.holder.get(self.name, MISSING)

    def restore(self) -> None:
        """Assign the recorded value to the name again, or delete the name if it had no value."""
        if self.value is not MISSING:
            self.assign(self.value)
        elif isinstance(self.holder, dict):
            del self.holder[self.name]
        else:
            delattr(self.owner, self.name)

    def assign(self, value: Any) -> None:
        """Assign ``value`` to the name."""
        if isinstance(self.holder, dict):
            self.holder[self.name] = value
        else:
            setattr(self.owner, self.name, value)


class Attributes:
    """A :class:`Holder` that looks up attributes by ``getattr``.

    It serves objects without a dict, thread-local objects, and the contents of closure cells.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def get(self, name: str, default: Any) -> Any:
        try:
            return getattr(self._owner, name, default)
        except (ValueError, RuntimeError):  # An empty cell; a setting that PyTorch refuses to read.
            return default


class _Slots:
    """A :class:`Holder` of the slots of an object that has no ``__dict__``."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def keys(self) -> set[str]:
        return set(slots_of(type(self._owner)))  # type: ignore[arg-type]

    def get(self, name: str, default: Any) -> Any:
        return getattr(self._owner, name, default)


class _Referent:
    """A :class:`Holder` of the object that a weak reference or proxy refers to."""

    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def get(self, name: str, default: Any) -> Any:
        return referent(self._reference)


def roots(executed: Executed) -> Iterator[Source]:
    """Yield the globals that a function names, or MISSING, and the modules that it imports."""
    names, space = executed.names, executed.globals
    for name in sorted(names.globals):
        holder = space if name in space or name not in vars(builtins) else vars(builtins)
        yield Source(holder, holder, name, name, holder.get(name, MISSING))
    package = space.get("__package__")
    modules = {
        importlib.util.resolve_name(m, package) for m in names.modules if package or m[0] != "."
    }
    # A string may be an argument of importlib.import_module.
    modules |= {s for s in names.strings if not is_library(s)}
    for name in sorted(modules & sys.modules.keys()):
        yield Source(sys.modules, sys.modules, name, name, sys.modules[name])


def free_variables(
    executed: Executed, closures: Closures, known: Iterable[Any] = ()
) -> Iterator[Source]:
    """Yield the free variables of a function that ran, as contents of its closure cells.

    A frame does not refer to its function. Among the functions with its code, it is found by the
    values of the free variables.

    Args:
        closures: finds the functions with its code.
        known: the values that forward can reach.

    Raises:
        CaptureError: the function is not found, so that no guard could watch its variables.
    """
    # The compiler's own cell of ``super()``, whose class is that of a method of forward.
    free = {n: v for n, v in executed.free.items() if n != "__class__"}
    if not free:
        return
    if executed.cells is not None:
        for n, value in free.items():
            cell = executed.cells[n]
            yield Source(cell, Attributes(cell), "cell_contents", n, value)
        return
    found = _cells(closures.of(executed.code, known), free)
    if found is None and gc.get_freeze_count():
        raise CaptureError(
            f"{executed.code.co_qualname} reads {', '.join(free)} of an enclosing function, "
            "which gc.freeze() hides; call gc.unfreeze() before add_tvm_dispatch"
        )
    for n, (cell, held) in (found or {}).items():
        yield Source(cell, held, "cell_contents", n, free[n])


def _cells(
    among: Iterable[types.FunctionType], free: Mapping[str, Any]
) -> dict[str, tuple[types.CellType, Attributes]] | None:
    """Return the cells of the first function with these free variables, by name; or None.

    The functions have the same code.
    """
    for function in among:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        held = {n: (cells[n], Attributes(cells[n])) for n in free}
        if all(held[n][1].get("cell_contents", MISSING) is v for n, v in free.items()):
            return held
    return None


def below(source: Source, names: Collection[str]) -> Iterator[Source]:
    """Yield the attributes of the value at ``source`` that have one of the ``names``."""
    value = source.value
    held = attributes_below(value)
    for name in sorted(names if isinstance(held, Attributes) else (held or {}).keys() & names):
        inner = unpatched(held.get(name, MISSING), MISSING)
        if inner is not MISSING and name != "__name__" and _leads_on(value, inner):
            yield Source(value, held, name, f"{source.label}.{name}", inner)
    for name in _inherited(value, names) if isinstance(held, types.MappingProxyType) else ():
        yield Source(value, held, name, f"{source.label}.{name}", MISSING)


def _inherited(cls: type, names: Collection[str]) -> list[str]:
    """Return those of ``names`` that the user's base classes of ``cls`` define as data.

    An assignment to the class would hide the value of the base class.
    """
    held = {n: v for b in reversed(cls.__mro__) if is_of_users(b) for n, v in vars(b).items()}
    return sorted(n for n in held.keys() & names if n not in vars(cls) and is_data(held[n]))


def bound_values(source: Source) -> Iterator[Source]:
    """Yield values that the value at ``source`` leads to without a name in the code of a function.

    A bound method has an object, a ``functools.partial`` has arguments, and a container may hold
    functions and classes. A guard of the container compares which ones it holds.
    """
    value = source.value
    if is_weak(value):
        yield Source(value, _Referent(value), "", f"{source.label}()", referent(value))
        return
    names = next((n for kind, n in _BOUND.items() if isinstance(value, kind)), ())
    if isinstance(value, types.MethodType) and _is_of_library(value.__self__):
        return
    for name in names:
        held = Attributes(value)
        yield Source(value, held, name, f"{source.label}.{name}", getattr(value, name))
    # Not isinstance: a subclass may report a wrong length.
    if type(value) not in _CONTAINERS or len(value) > LARGEST_REGISTRY:
        return
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, _LEADING) and not _is_of_library(item):
            yield Source(item, {"": item}, "", f"an item of {source.label}", item)


def _is_of_library(value: Any) -> bool:
    """Whether ``value`` is a function, class, or object of a class, of a library's module."""
    defined = isinstance(value, type | types.FunctionType)
    return not isinstance(value, (*_BOUND, *_CONTAINERS)) and is_library(
        (value if defined else type(value)).__module__
    )


def namespaces(source: Source) -> Iterator[Source]:
    """Yield the namespaces of user code that a value gives access to.

    The namespaces are the value itself, if it has attributes, its class and base classes, and the
    classes of objects that it holds. A function that is passed the value may look up attributes in
    each of them.
    """
    value = source.value
    whole = is_data(value) or is_object(value)
    classes = [type(held) for held in all_held(value)] if whole else [type(value)]
    if isinstance(value, type):
        classes = [value, type(value)]
    elif attributes_below(value) is not None:
        named = "__name__" if isinstance(value, types.ModuleType) else "__module__"
        if isinstance(value, threading.local) or not is_library(getattr(value, named, None)):
            yield source
    for cls in dict.fromkeys(base for each in classes for base in each.__mro__):
        if is_of_users(cls):
            yield Source(cls, {}, "", cls.__name__, cls)


def attributes_below(value: Any) -> Any:
    """Return a holder of ``value``'s attributes; None if it has none, or is compared as a whole."""
    if isinstance(value, type):
        return vars(value) if is_of_users(value) else None
    kind = value.__name__ if isinstance(value, types.ModuleType) else type(value).__module__
    # The modules under torch.backends have classes whose properties read PyTorch's settings.
    if isinstance(value, threading.local) or str(kind).startswith("torch.backends"):
        return Attributes(value)
    held = getattr(value, "__dict__", None)
    if isinstance(value, (torch.Tensor, nn.Module)):
        return None
    if held is None and is_of_users(type(value)) and slots_of(type(value)):  # type: ignore[arg-type]
        held = _Slots(value)
    if not isinstance(held, dict | _Slots):
        return None
    return None if is_constant(value) or is_data(value) or is_object(value) else held


def names_in(source: Source) -> Mapping[str, Any]:
    """Return the names at ``source`` with their values; none for an object that can get none."""
    return getattr(source.value, "__dict__", {})


def names_added(source: Source, before: frozenset[str]) -> Iterator[str]:
    """Yield the names at ``source`` that ``before`` does not have, except for imports."""
    for name, value in list(names_in(source).items()):
        if name not in before and not (name.startswith("__") or _is_imported(source, value)):
            yield name


def _is_imported(source: Source, value: Any) -> bool:
    """Whether an import may have added ``value`` to the namespace at ``source``.

    A package may import a function or class from one of its modules at the first access.
    """
    if isinstance(value, types.ModuleType):
        return True
    defined = isinstance(value, type | types.FunctionType)
    package = f"{getattr(source.value, '__name__', '')}."
    in_package = isinstance(source.value, types.ModuleType) and defined
    return in_package and str(value.__module__).startswith(package)


def _leads_on(owner: Any, value: Any) -> bool:
    """Whether the search goes on from ``owner`` to its attribute ``value``.

    From a library's module it goes on to the library's own submodules, but not to other modules
    that the library imports.
    """
    if not isinstance(owner, types.ModuleType) or not isinstance(value, types.ModuleType):
        return True
    return not is_library(owner.__name__) or value.__name__.startswith(f"{owner.__name__}.")
