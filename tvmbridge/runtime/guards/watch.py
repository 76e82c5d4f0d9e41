"""Watches: whether dictionaries, classes of objects and the memory of tensors are what they were.

A module's structure, attributes and hooks live in dictionaries. While none of these has changed,
every tensor that was looked up in them is still the one to use, so that a call looks nothing up.
The question is asked at each call: where ``runtime/_native.c`` could be compiled, in one call that
compares versions of dictionaries; otherwise by :class:`PythonWatch`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Protocol

import torch

try:
    from tvmbridge.runtime import _native
except ImportError:  # there was no C compiler, or this Python has no versions of dictionaries
    _native = None  # type: ignore[assignment]

_data_ptr = torch.Tensor.data_ptr
_version = operator.attrgetter("_version")


class Watch(Protocol):
    """What was there when it was made."""

    def unchanged(self) -> bool:
        """Whether all of it is as it was."""


class PythonWatch:
    """Compares dictionaries by their keys and values, which must be the same objects in order.

    Args:
        dicts: dictionaries, which are held.
        objects: objects of which the classes are remembered.
        tensors: tensors of which the addresses are remembered.
    """

    def __init__(
        self, dicts: Sequence[dict[Any, Any]], objects: Sequence[Any], tensors: Sequence[Any]
    ) -> None:
        self._dicts = tuple(dicts)
        self._objects = tuple(objects)
        self._tensors = tuple(tensors)
        self._sizes = list(map(len, self._dicts))
        self._keys = list(chain.from_iterable(self._dicts))
        self._values = list(chain.from_iterable(map(dict.values, self._dicts)))
        self._types = list(map(type, self._objects))
        self._pointers = list(map(_data_ptr, self._tensors))

    def unchanged(self) -> bool:
        """Whether all of it is as it was."""
        return (
            list(map(len, self._dicts)) == self._sizes
            and list(map(type, self._objects)) == self._types
            and _same(chain.from_iterable(self._dicts), self._keys)
            and _same(chain.from_iterable(map(dict.values, self._dicts)), self._values)
            and list(map(_data_ptr, self._tensors)) == self._pointers
        )


def _same(now: Iterable[Any], before: list[Any]) -> bool:
    return all(map(operator.is_, now, before))


def watch(
    dicts: Sequence[dict[Any, Any]], objects: Sequence[Any], tensors: Sequence[torch.Tensor]
) -> Watch:
    """Remember the ``dicts``, the classes of ``objects`` and the addresses of ``tensors``."""
    if _native is None:
        return PythonWatch(dicts, objects, tensors)
    try:
        return _native.Watch(tuple(dicts), tuple(objects), tuple(tensors), torch.Tensor)
    except Exception:  # a dtype that DLPack has no name for
        return PythonWatch(dicts, objects, tensors)


def versions_of(tensors: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    """How often each of ``tensors`` was written.

    Raises:
        RuntimeError: one was made in inference mode, and has no version.
    """
    if _native is None:
        return tuple(map(_version, tensors))
    return _native.versions(tensors)


def is_native() -> bool:
    """Whether the compiled half is there."""
    return _native is not None
