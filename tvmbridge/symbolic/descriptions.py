"""Descriptions of compiled code for any size.

A compiled module is described by frozen dataclasses: its inputs, outputs, layouts, and the values
that forward passes to backward. At several sizes, the descriptions differ only in integers.
:func:`merged` combines them into one, with a :class:`~.sizes.Size` for each such integer.
:func:`at` returns the description at a point (a value for each symbol).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

from tvmbridge.symbolic.size import Size
from tvmbridge.symbolic.sizes import DifferentCodeError, Sizes

_T = TypeVar("_T")


def merged(values: Sequence[_T], sizes: Sizes, where: str) -> _T:
    """Combine ``values``, one for each point of ``sizes``, into one symbolic description.

    Args:
        where: a phrase for the description in messages.

    Raises:
        DifferentCodeError: the descriptions differ in more than sizes.
    """
    found: _T = _merged(values, sizes, where)
    return found


def _merged(values: Sequence[Any], sizes: Sizes, where: str) -> Any:
    first: Any = values[0]
    if all(v is first for v in values):
        return first
    if any(type(v) is not type(first) for v in values):
        raise DifferentCodeError(f"{where} is {[type(v).__name__ for v in values]}")
    if type(first) is int:
        return first if len(set(values)) == 1 else _size(values, sizes, where)
    if _is_description(first):
        changes = {
            f.name: merged([getattr(v, f.name) for v in values], sizes, f"{where}.{f.name}")
            for f in fields(first)
            if f.init
        }
        return replace(first, **changes)
    if isinstance(first, Mapping):
        return _mapping(values, sizes, where)
    if isinstance(first, tuple | list):
        return _sequence(values, sizes, where)
    if any(not _equal(first, v) for v in values):
        raise DifferentCodeError(f"{where} differs")
    return first


def _size(values: Any, sizes: Sizes, where: str) -> Any:
    found = sizes.find_divided(tuple(values))
    if found is None:
        raise DifferentCodeError(f"{where} is {tuple(values)} at {sizes.points}")
    return found


def _mapping(values: Sequence[Any], sizes: Sizes, where: str) -> Any:
    first = values[0]
    if any(list(v) != list(first) for v in values):
        raise DifferentCodeError(f"{where} has other keys")
    found = {k: merged([v[k] for v in values], sizes, f"{where}[{k}]") for k in first}
    return found if any(found[k] is not first[k] for k in first) else first


def _sequence(values: Sequence[Any], sizes: Sizes, where: str) -> Any:
    first = values[0]
    if any(len(v) != len(first) for v in values):
        raise DifferentCodeError(f"{where} has {[len(v) for v in values]} elements")
    found = [merged(items, sizes, where) for items in zip(*values, strict=True)]
    if all(a is b for a, b in zip(found, first, strict=True)):
        return first
    return _like(first, found)


def _like(first: Any, items: list[Any]) -> Any:
    """Return ``items`` as a sequence of the kind of ``first``, which may be a named tuple."""
    if isinstance(first, list):
        return items
    return type(first)(*items) if hasattr(first, "_fields") else tuple(items)


def _is_description(value: Any) -> bool:
    if isinstance(value, type) or not is_dataclass(value):
        return False
    return type(value).__module__.startswith("tvmbridge.")


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    return same_tensor(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and numbers."""
    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(a, b)


def at(value: _T, point: Sequence[int]) -> _T:
    """Return the description ``value`` with the numbers of ``point`` in place of its sizes."""
    found: _T = _at(value, point)
    return found


def _at(given: Any, point: Sequence[int]) -> Any:
    if isinstance(given, Size):
        return given.at(point)
    if _is_description(given):
        changes = {}
        for field in fields(given):
            old = getattr(given, field.name)
            new = at(old, point)
            if new is not old:
                changes[field.name] = new
        return replace(given, **changes) if changes else given
    if isinstance(given, Mapping):
        found = {k: at(v, point) for k, v in given.items()}
        return found if any(found[k] is not given[k] for k in given) else given
    if isinstance(given, tuple | list):
        items = [at(v, point) for v in given]
        if all(a is b for a, b in zip(items, given, strict=True)):
            return given
        return _like(given, items)
    return given
