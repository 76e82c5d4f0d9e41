"""The guard of class attributes that would hide attributes of instances which forward reads.

Python looks up a data descriptor, such as a property, in the class before the instance. So a
property that a class gets later hides an attribute of the same name in an instance. PyTorch looks
up parameters, buffers and submodules last, so any class attribute hides these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import Any

from torch import nn

from tvmbridge.core.contents import MISSING
from tvmbridge.runtime.guards.watch import Asked, dict_of_class

_REGISTERED = ("_parameters", "_buffers", "_modules")
# Methods by which Python looks up an attribute and calls an instance.
_LOOK_UPS = ("__getattribute__", "__getattr__", "__call__")
_EVERY: frozenset[type] = frozenset((nn.Module, object))


class ClassEntries:
    """Compares the entries of classes that could hide what forward reads in instances."""

    def __init__(self) -> None:
        # By class: the present entry under each name, and whether any other entry would hide it.
        self._expected: dict[type, dict[str, tuple[Any, bool]]] = {}

    def add(self, class_: type, names: Iterable[str], registered: Collection[str] = ()) -> None:
        """Watch the entries of ``class_`` and its bases.

        Args:
            names: attributes in the ``__dict__`` of the instance.
            registered: names of parameters, buffers and submodules of the instance.
        """
        for each in class_.__mro__:
            if each in _EVERY:
                continue
            known = self._expected.setdefault(each, {})
            for name in names:
                known.setdefault(name, (each.__dict__.get(name, MISSING), False))
            for name in (*registered, *(_LOOK_UPS if registered else ())):
                known[name] = each.__dict__.get(name, MISSING), True

    def changed(self) -> str | None:
        """Return a label of a class attribute that hides something now, or no longer does."""
        found = (_changed(c, entries) for c, entries in self._expected.items())
        return next(filter(None, found), None)

    def asked(self) -> Iterator[Asked]:
        """Yield the dictionary of each class, with a function that compares what matters."""
        for class_, entries in self._expected.items():
            if entries:
                yield dict_of_class(class_), partial(_holds, class_, entries), None


def registered_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters, buffers and submodules of ``module`` itself."""
    return [name for held in _REGISTERED for name in vars(module).get(held, ())]


def _holds(class_: type, entries: dict[str, tuple[Any, bool]]) -> bool:
    return _changed(class_, entries) is None


def _changed(class_: type, entries: dict[str, tuple[Any, bool]]) -> str | None:
    for name, (expected, any_hides) in entries.items():
        now = class_.__dict__.get(name, MISSING)
        if now is not expected and (any_hides or _is_first(now) or _is_first(expected)):
            return f"the attribute {name} of class {class_.__name__}"
    return None


def _is_first(value: Any) -> bool:
    """Whether ``value``, in a class, is found before an attribute of an instance."""
    return hasattr(type(value), "__set__") or hasattr(type(value), "__delete__")
