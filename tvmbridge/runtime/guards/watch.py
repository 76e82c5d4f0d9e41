"""Watches: whether dictionaries, objects and tensors are unchanged.

A module's structure, attributes and hooks live in dictionaries. As long as the dictionaries are
unchanged, all tensors found in them earlier are still right, and a call looks nothing up. The
comparison runs at each call. If ``runtime/_native.cpp`` could be compiled, one native call compares
versions of dictionaries, which it counts itself from Python 3.12 on. Otherwise the comparison runs
in Python, with PyTorch's ``TensorGuards``.
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

from tvmbridge.calls.plain import has_no_shape
from tvmbridge.core.compiled_half import compiled_half
from tvmbridge.core.contents import MISSING
from tvmbridge.core.torch_private import TensorGuards

# A dictionary, a key, and the object under that key, or MISSING.
Place: TypeAlias = tuple[dict[Any, Any], Any, Any]
# A dictionary, and a function that returns whether the entries that matter are unchanged.
Asked: TypeAlias = tuple[dict[Any, Any], Callable[[], bool], None]
# A function, its code and its defaults.
Code: TypeAlias = tuple[types.FunctionType, types.CodeType, tuple[Any, ...] | None]

_ALIGNMENT_MASK = 63
_data_ptr = torch.Tensor.data_ptr
_version = operator.attrgetter("_version")
_dict_of = operator.attrgetter("__dict__")


@functools.cache
def native_half() -> Any:
    """Return the native module, which is compiled at its first use; None if it cannot be."""
    return compiled_half("tvmbridge.runtime._native")


class Watch(Protocol):
    """Remembers dictionaries, objects and tensors as they are when it is created."""

    def unchanged(self) -> bool:
        """Whether everything is unchanged since then."""


class PythonWatch:
    """A watch in Python: keys and values must be the same objects in the same order."""

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
        self._with_dict = [o for o in self._objects if hasattr(o, "__dict__")]
        self._dicts_of = list(map(_dict_of, self._with_dict))
        self._pointers = list(map(_data_ptr, self._tensors))
        self._once = tuple({id(t): t for t in self._tensors}.values())
        self._guards = _tensor_guards(self._once)
        self._places = tuple(places)
        self._functions = tuple(functions)
        self._asked = tuple(asked)

    def unchanged(self) -> bool:
        """Whether everything is unchanged since the watch was created."""
        return (
            list(map(len, self._dicts)) == self._sizes
            and list(map(type, self._objects)) == self._types
            and _same(map(_dict_of, self._with_dict), self._dicts_of)
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
    """Return PyTorch's comparison of tensors in all but values and addresses."""
    if not tensors:
        return lambda: True
    # As PyTorch's own guards call it; the annotations there lack the list of tensors.
    shapes: Any = [list(t.shape) for t in tensors]
    strides: Any = [list(t.stride()) for t in tensors]
    check = TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check

    def checked(*given: torch.Tensor) -> bool:
        # PyTorch's comparison ends the process for a strided nested tensor.
        return not any(map(has_no_shape, given)) and check(*given)

    return checked


def watch(
    dicts: Sequence[dict[Any, Any]],
    objects: Sequence[Any],
    tensors: Sequence[torch.Tensor],
    places: Sequence[Place] = (),
    functions: Sequence[Code] = (),
    asked: Sequence[Asked] = (),
) -> Watch:
    """Return a watch of the given objects, in native code if possible.

    Args:
        objects: objects of which the class and the ``__dict__`` must stay the same.
        places: single entries of dictionaries in which other entries do not matter.
        functions: functions, each with its code and defaults.
        asked: dictionaries, each with a function that compares the entries that matter.
    """
    native = native_half()
    if native is None:
        return PythonWatch(dicts, objects, tensors, places, functions, asked)
    # The native watch compares the places of one dictionary together, if it has changed.
    places = sorted(places, key=lambda place: id(place[0]))
    held = map(tuple, (dicts, objects, tensors, places, functions, asked))
    made: Watch = native.Watch(*held, MISSING)
    return made


def dict_of_class(class_: type) -> dict[str, Any]:
    """Return the dictionary of a class; ``class_.__dict__`` is only a view of it."""
    return behind(class_.__dict__)


def behind(proxy: types.MappingProxyType[str, Any]) -> Any:
    """Return the dictionary that a ``mappingproxy`` is a view of."""
    (held,) = gc.get_referents(proxy)
    return held


def alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a function that compares tensors with these in all but values and addresses.

    If a tensor here begins at a multiple of 64 bytes, so must the one that is compared with it.
    """
    native = native_half()
    if native is not None:
        check: Callable[..., bool] = native.Alike(*tensors).check
        return check
    # One guard for each: PyTorch's guard of several tensors refuses a tensor that is passed twice,
    # such as inputs that are also the labels.
    guards = [_tensor_guards([t]) for t in tensors]
    aligned = [not t.data_ptr() & _ALIGNMENT_MASK for t in tensors]

    def checked(*given: torch.Tensor) -> bool:
        return all(
            guard(t) and not (must and t.data_ptr() & _ALIGNMENT_MASK)
            for guard, must, t in zip(guards, aligned, given, strict=True)
        )

    return checked


def versions_of(tensors: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    """Return the version of each tensor, which PyTorch increments at each write.

    Raises:
        RuntimeError: a tensor was created in inference mode and has no version.
    """
    native = native_half()
    if native is None:
        return tuple(map(_version, tensors))
    found: tuple[int, ...] = native.versions(tensors)
    return found


# Tensors that move have come to rest after so many calls without a move, the first time.
_AT_REST = 8


class MovingTensors:
    """Tensors of a module that are at new addresses at each call, as those that FSDP gathers.

    Everything but values and addresses must be as it was at the creation. Once the addresses stay
    the same, :meth:`fit` says so: code that is bound to the addresses is faster. It takes long to
    prepare, so that each rest must be eight times as long as the one before.

    Args:
        before: what has watched the tensors until now.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], before: MovingTensors | None) -> None:
        self._tensors = tuple(tensors)
        self._alike = alike(self._tensors)
        self._addresses: list[int] = []
        self._rest = 0
        self._least: int = _AT_REST if before is None else before._least

    def fit(self) -> bool:
        """Whether the tensors are like those at the creation, and have not come to rest."""
        addresses = list(map(_data_ptr, self._tensors))
        self._rest = self._rest + 1 if addresses == self._addresses else 0
        self._addresses = addresses
        return self._rest < self._least and self._alike(*self._tensors)

    def end_rest(self) -> bool:
        """Whether the tensors have come to rest; if so, the next rest must be longer."""
        rested = self._rest >= self._least
        if rested:
            self._rest, self._least = 0, _AT_REST * self._least
        return rested
