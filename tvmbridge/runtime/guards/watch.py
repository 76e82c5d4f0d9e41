"""Watches: whether dictionaries, classes of objects and tensors are what they were.

A module's structure, attributes and hooks live in dictionaries. While none of these has changed,
every tensor that was looked up in them is still the one to use, so that a call looks nothing up.
The question is asked at each call: where ``runtime/_native.cpp`` could be compiled, in one call
that compares versions of dictionaries, which it counts itself from Python 3.12 on; otherwise in
Python, with PyTorch's ``TensorGuards``.
"""

from __future__ import annotations

import functools
import gc
import operator
import types
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Protocol, TypeAlias

import torch

from tvmbridge.core.compiled_half import compiled_half
from tvmbridge.core.contents import MISSING
from tvmbridge.core.torch_private import TensorGuards

# A dictionary, a key, and the object that stands there or MISSING.
Place: TypeAlias = tuple[dict[Any, Any], Any, Any]
# A dictionary, and a function that says whether what matters in it is as it should be.
Asked: TypeAlias = tuple[dict[Any, Any], Callable[[], bool], None]
# A function, its code and its defaults.
Code: TypeAlias = tuple[types.FunctionType, types.CodeType, tuple[Any, ...] | None]

_ALIGNMENT_MASK = 63
_data_ptr = torch.Tensor.data_ptr
_version = operator.attrgetter("_version")


@functools.cache
def _native() -> Any:
    """The compiled half, asked for at the first use: it may have to be compiled."""
    return compiled_half("tvmbridge.runtime._native")


class Watch(Protocol):
    """What was there when it was made."""

    def unchanged(self) -> bool:
        """Whether all of it is as it was."""


class PythonWatch:
    """Compares dictionaries by their keys and values, which must be the same objects in order.

    Args:
        dicts: dictionaries, which are held.
        objects: objects of which the classes are remembered.
        tensors: tensors of which all but the values is remembered, the addresses too.
        places: dictionaries, each with a key and the object that stands there.
        functions: functions, each with its code and its defaults.
        asked: dictionaries, each with a function to be called when it has changed.
    """

    def __init__(
        self,
        dicts: Sequence[dict[Any, Any]],
        objects: Sequence[Any],
        tensors: Sequence[Any],
        places: Sequence[Place] = (),
        functions: Sequence[Code] = (),
        asked: Sequence[Asked] = (),
    ) -> None:
        self._dicts = tuple(dicts)
        self._objects = tuple(objects)
        self._tensors = tuple(tensors)
        self._sizes = list(map(len, self._dicts))
        self._keys = list(chain.from_iterable(self._dicts))
        self._values = list(chain.from_iterable(map(dict.values, self._dicts)))
        self._types = list(map(type, self._objects))
        self._pointers = list(map(_data_ptr, self._tensors))
        self._once = tuple({id(t): t for t in self._tensors}.values())
        self._guards = _tensor_guards(self._once)
        self._places = tuple(places)
        self._functions = tuple(functions)
        self._asked = tuple(asked)

    def unchanged(self) -> bool:
        """Whether all of it is as it was."""
        return (
            list(map(len, self._dicts)) == self._sizes
            and list(map(type, self._objects)) == self._types
            and _same(chain.from_iterable(self._dicts), self._keys)
            and _same(chain.from_iterable(map(dict.values, self._dicts)), self._values)
            and all(d.get(key, MISSING) is value for d, key, value in self._places)
            and all(holds() for _, holds, _ in self._asked)
            and all(f.__code__ is c and f.__defaults__ is d for f, c, d in self._functions)
            and self._guards(*self._once)
            and list(map(_data_ptr, self._tensors)) == self._pointers
        )


def _same(now: Iterable[Any], before: list[Any]) -> bool:
    return all(map(operator.is_, now, before))


def _tensor_guards(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """PyTorch's comparison of all but values and addresses."""
    if not tensors:
        return lambda: True
    # As PyTorch's own guards call it; the annotations there lack the list of tensors.
    shapes: Any = [list(t.shape) for t in tensors]
    strides: Any = [list(t.stride()) for t in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check


def watch(
    dicts: Sequence[dict[Any, Any]],
    objects: Sequence[Any],
    tensors: Sequence[torch.Tensor],
    places: Sequence[Place] = (),
    functions: Sequence[Code] = (),
    asked: Sequence[Asked] = (),
) -> Watch:
    """Remember the ``dicts``, the classes of ``objects``, and ``tensors`` with their addresses.

    Of dictionaries with other entries that do not matter, ``places`` are what does, or a function
    of ``asked`` looks at it; ``functions`` are remembered by their code and defaults.
    """
    native = _native()
    if native is None:
        return PythonWatch(dicts, objects, tensors, places, functions, asked)
    # The places of a dictionary are looked at together, where it has changed.
    places = sorted(places, key=lambda place: id(place[0]))
    held = map(tuple, (dicts, objects, tensors, places, functions, asked))
    made: Watch = native.Watch(*held, MISSING)
    return made


def dict_of_class(class_: type) -> dict[str, Any]:
    """The dictionary behind ``class_.__dict__``, which is a view of it."""
    return behind(class_.__dict__)


def behind(proxy: types.MappingProxyType[str, Any]) -> Any:
    """What a ``mappingproxy`` is a view of."""
    (held,) = gc.get_referents(proxy)
    return held


def alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that says whether tensors are like these in all but values and addresses.

    One must begin at an aligned address (of 64 bytes) where the one here does.
    """
    native = _native()
    if native is not None:
        check: Callable[..., bool] = native.Alike(*tensors).check
        return check
    # One for each: PyTorch's guard of several refuses a tensor that is given twice, as labels are
    # that are the inputs.
    guards = [_tensor_guards([t]) for t in tensors]
    aligned = [not t.data_ptr() & _ALIGNMENT_MASK for t in tensors]

    def checked(*given: torch.Tensor) -> bool:
        return all(
            guard(t) and not (must and t.data_ptr() & _ALIGNMENT_MASK)
            for guard, must, t in zip(guards, aligned, given, strict=True)
        )

    return checked


def versions_of(tensors: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    """How often each of ``tensors`` was written.

    Raises:
        RuntimeError: one was made in inference mode, and has no version.
    """
    native = _native()
    if native is None:
        return tuple(map(_version, tensors))
    found: tuple[int, ...] = native.versions(tensors)
    return found
