"""Definitions: the functions and classes that forward calls by name, which may be exchanged.

A helper that is patched, or reloaded while a notebook runs, leaves the old one in compiled code.
Which function a name means is watched, and the code of each: reloading exchanges that alone.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from tvmbridge.core.assumptions import OutsideValue
from tvmbridge.core.contents import is_constant
from tvmbridge.graph_capture.observe.data import is_data, is_object
from tvmbridge.graph_capture.observe.sources import Attributes, Place

_KINDS = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    functools._lru_cache_wrapper,
)
# Of larger mappings without data among their values the entries are not watched.
_LARGEST_REGISTRY = 64
_IN_CLASSES = (types.FunctionType, property, staticmethod, classmethod)


def named(passed: Sequence[Place]) -> Iterator[OutsideValue]:
    """The function, class or module that a mention ends at, or a class whose method it is.

    Of a mapping of functions (the caller knows that there is no data in it) each entry; others may
    be added. Those of PyTorch itself and of Python's library are left out.
    """
    *before, place = passed
    if before and isinstance(before[-1].value, type):
        *before, place = before
    owner = before[-1].value if before else None
    package = owner.__name__ if isinstance(owner, types.ModuleType) else ""
    if package == "torch" or package.partition(".")[0] in sys.stdlib_module_names:
        return
    own = isinstance(place.value, _KINDS) and not _is_of_pythons_library(place.value)
    if own or (isinstance(place.value, nn.Module) and not isinstance(owner, nn.Module)):
        yield exactly(place)
    elif isinstance(place.value, dict) and len(place.value) <= _LARGEST_REGISTRY:
        for key, value in place.value.items():
            label = f"{place.label}[{key!r}]"
            yield exactly(Place(place.value, place.value, key, label, value))


def _is_of_pythons_library(value: Any) -> bool:
    defined = isinstance(value, type | types.FunctionType | types.BuiltinFunctionType)
    return defined and str(value.__module__).partition(".")[0] in sys.stdlib_module_names


def exactly(place: Place) -> OutsideValue:
    """What must be that very object, whatever it holds."""
    return OutsideValue(place.holder, place.name, place.label, place.value, place.key, itself=True)


def of_class(cls: type, names: Iterable[str]) -> Iterator[OutsideValue]:
    """The methods and properties of ``cls`` itself that are called by one of ``names``."""
    held = vars(cls)
    for name in names:
        if isinstance(held.get(name), _IN_CLASSES):
            yield exactly(Place(cls, held, name, f"{cls.__name__}.{name}", held[name]))


def defaults(value: Any) -> Iterator[Place]:
    """The defaults of the functions that ``value`` is made of, where calls could change them."""
    for function in _functions(value):
        for name in ("__defaults__", "__kwdefaults__"):
            held = getattr(function, name)
            each = held.values() if isinstance(held, dict) else held or ()
            if any(not is_constant(d) and (is_data(d) or is_object(d)) for d in each):
                label = f"a default of {function.__name__}"
                yield Place(function, Attributes(function), name, label, held)


class Codes:
    """The code of functions, and the defaults of their parameters, behind one name.

    It stands for itself as long as they are the same; otherwise for the first that is not.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        functions = [f for value in values for f in _functions(value)]
        self._before = [(f, f.__code__, f.__defaults__) for f in functions]

    def get(self, name: str, default: Any) -> Any:
        for function, code, defaults in self._before:  # This runs at every call.
            if function.__code__ is not code or function.__defaults__ is not defaults:
                return function
        return self

    def watched(self) -> OutsideValue:
        """The value that a guard compares."""
        key = (id(self), "")
        return OutsideValue(self, "", "the code of a function", self, key, itself=True)


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """The functions of Python that ``value`` is, or is made of."""
    if isinstance(value, property):
        parts: list[Any] = [value.fget]
    elif isinstance(value, functools.partial):
        parts = [value.func]
    elif isinstance(value, types.MethodType | staticmethod | classmethod):
        parts = [value.__func__, getattr(value, "__wrapped__", None)]
    else:
        # Not by getattr: it may run code of users, and what stands for a missing package raises.
        parts = [inspect.getattr_static(value, "__wrapped__", None), value]
    yield from (part for part in parts if isinstance(part, types.FunctionType))
