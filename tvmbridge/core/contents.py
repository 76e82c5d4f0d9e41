"""Contents of attributes and arguments, and whether two values are the same for forward."""

from __future__ import annotations

import enum
import functools
import math
import operator
import pickle
import queue
import random
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy
import torch
from torch import fx, nn

from tvmbridge.core.states import StateOf, reader_of

# Marks an attribute that does not exist.
MISSING: Any = enum.Enum("Missing", "MISSING").MISSING  # type: ignore[attr-defined]
# As an expected value, matches any tensor.
ANY_TENSOR: Any = enum.Enum("Tensor", "ANY_TENSOR").ANY_TENSOR  # type: ignore[attr-defined]


@dataclass(frozen=True)
class AnyNumber:
    """As an expected value, matches any int or float: a number that is an input of the code.

    - ``name``: the name of the input.
    """

    name: str


class NumberStandIn:
    """Stands for a number in a trace. It is one value, whatever attributes it has."""

    __slots__ = ()


# How many levels of nested objects are examined. A plain container counts as a part of a level:
# configurations nest dictionaries deeply, and seldom in a circle.
DEPTH = 4.0
_OF_CONTAINER = 0.25
# Values of these classes are compared by identity. Guards watch modules separately, and the other
# values hold nothing that could change.
_THEMSELVES = (
    torch.Tensor,
    nn.Module,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    enum.Enum,
    NumberStandIn,
)
CONTAINERS = (Mapping, list, tuple, set, frozenset, deque)
# Items are read by the base class's __iter__: a subclass may report a wrong length.
_SEQUENCES: tuple[Any, ...] = (list, tuple, deque)
_WORDS = frozenset({"u1", "u2", "u4", "u8"})  # numpy's names of unsigned integers
_PLAIN_VALUES = frozenset({bool, int, float, complex, str, bytes, range, type(None), type(...)})
_PLAIN_CONTAINERS = frozenset({dict, list, tuple})
# The pairs of objects that a walk has passed, by their ids, with the levels that were left there.
# The walk holds the objects, so that their ids are not used again.
Passed: TypeAlias = dict[tuple[int, int], tuple[float, Any, Any]]
_OF_TENSORS = frozenset({torch.Size, torch.dtype, torch.device, torch.layout})


@dataclass(frozen=True)
class PartOf:
    """The expected attributes of a plain object, if forward read only some of them.

    - ``kind``: the class of the object.
    - ``attributes``: the attributes that forward read, by name; MISSING for an absent one.
    - ``asks``: whether to read attributes by ``getattr``, since the class has its own look-up;
      otherwise they are read from the object's ``__dict__``.

    Example: forward read only ``config.act``: ``PartOf(Config, {"act": "relu"})``.
    """

    kind: type
    attributes: dict[str, Any]
    asks: bool = False

    def found(self, value: Any, name: str) -> Any:
        """Return the attribute ``name`` of ``value``, or MISSING if there is none.

        If the look-up raises an error, return the class of the error.
        """
        if not self.asks:
            return vars(value).get(name, MISSING)
        try:
            found = getattr(value, name, MISSING)
        except Exception as error:  # the class of ``value`` may raise any error
            return type(error)
        own_method = isinstance(found, types.MethodType) and found.__self__ is value
        return found.__func__ if own_method else found

    def fits(self, value: Any, depth: float = DEPTH, passed: Passed | None = None) -> bool:
        """Whether ``value`` has the expected class and attributes."""
        return type(value) is self.kind and all(
            same_value(self.found(value, name), expected, depth, passed)
            for name, expected in self.attributes.items()
        )


def deeper(value: Any, depth: float) -> float:
    """Return how many levels are left inside ``value``, of ``depth`` levels with it."""
    if type(value) in (PartOf, StateOf):  # Each has only what forward reads, at any depth.
        return depth
    return depth - (_OF_CONTAINER if type(value) in _PLAIN_CONTAINERS else 1)


def same_value(a: Any, b: Any, depth: float = DEPTH, passed: Passed | None = None) -> bool:
    """Whether two values are the same for forward: equal in value, type and sign of zero.

    ``b`` is the expected value: it, or a value inside it, may be a :class:`PartOf` or a
    :class:`StateOf`. Objects nested deeper than ``depth`` levels count as the same if their classes
    are equal; the attributes of a ``PartOf`` are all compared. ``passed`` has the pairs that are
    compared already: many objects may hold the same ones, or each other.
    """
    if a is b:
        return True
    if b is ANY_TENSOR:
        return isinstance(a, torch.Tensor)
    if type(b) is AnyNumber and type(a) is not AnyNumber:
        return type(a) in (int, float)
    if type(b) is PartOf and type(a) is not PartOf:
        return b.fits(a, depth, passed)
    if type(b) is StateOf and type(a) is not StateOf:
        any_state = b.state is None and type(a) is b.kind
        return any_state or same_value(b.now(a), b.state, depth, passed)
    if type(a) is not type(b) or issubclass(type(a), fx.Proxy):
        return False
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    if isinstance(a, bool | int | str | bytes):
        return bool(a == b)
    if isinstance(a, complex | torch.dtype | torch.device | range):
        return repr(a) == repr(b)
    if isinstance(a, _THEMSELVES):
        return False
    if isinstance(a, types.MethodType) and a.__func__ is not b.__func__:
        return False
    if depth <= 0:
        return True
    if isinstance(a, numpy.ndarray):
        return same_array(a, b)
    passed, pair = {} if passed is None else passed, (id(a), id(b))
    if pair in passed and passed[pair][0] >= depth:
        return True
    passed[pair] = depth, a, b
    ours, theirs = state_of(a), state_of(b)
    if ours is None or theirs is None:
        return False
    if len(ours) == len(theirs) and all(map(operator.is_, ours, theirs)):
        return True
    inside = deeper(b, depth)
    return len(ours) == len(theirs) and all(
        same_value(x, y, inside, passed) for x, y in zip(ours, theirs, strict=True)
    )


def same_array(a: numpy.ndarray[Any, Any], b: numpy.ndarray[Any, Any]) -> bool:
    """Whether two arrays have the same shape, dtype and bytes."""
    if a.shape != b.shape or a.dtype.str != b.dtype.str or _mask_of(a) != _mask_of(b):
        return False
    words, plain = f"u{a.itemsize}", not a.dtype.hasobject
    if plain and a.ndim and a.flags.c_contiguous and b.flags.c_contiguous and words in _WORDS:
        return bool((numpy.asarray(a).view(words) == numpy.asarray(b).view(words)).all())
    return a.tobytes() == b.tobytes()


def _mask_of(array: numpy.ndarray[Any, Any]) -> list[bytes]:
    """Return the mask of a masked array in a list; an empty list for another array."""
    is_masked = isinstance(array, numpy.ma.MaskedArray)
    return [numpy.ma.getmaskarray(array).tobytes()] if is_masked else []


def is_constant(value: Any) -> bool:
    """Whether ``value`` is a number, string, dtype, device or the like, or a tuple of constants."""
    if type(value) is tuple:
        return all(map(is_constant, value))
    return type(value) in _PLAIN_VALUES or type(value) in _OF_TENSORS


def contents(value: Any) -> list[Any]:
    """Return the items and attributes of a container or plain object, such as a configuration."""
    if type(value) in _PLAIN_CONTAINERS:  # Objects of exactly these classes have no attributes.
        return [*value, *value.values()] if type(value) is dict else [*value]
    if type(value) is OrderedDict and not value.__dict__:  # Modules keep their hooks in such dicts.
        return [*value, *value.values()]
    if isinstance(value, _THEMSELVES):
        return []
    attributes = attributes_of(value)
    held = [*attributes, *attributes.values()]
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values(), *held]
    for kind in _SEQUENCES:
        if isinstance(value, kind):
            return [*kind.__iter__(value), *held]
    if isinstance(value, set | frozenset):
        return [*sorted(value, key=repr), *held]
    return held


def all_held(*values: Any, depth: float = DEPTH) -> list[Any]:
    """Return ``values`` and, depth first, everything that they hold, down to ``depth`` levels.

    The contents of an object that is held several times may be listed only once.
    """
    found: list[Any] = []
    passed: Passed = {}
    for value in values:
        _collect(value, depth, found, passed)
    return found


def _collect(value: Any, depth: float, found: list[Any], passed: Passed) -> None:
    found.append(value)
    if depth <= 0 or type(value) in _PLAIN_VALUES or issubclass(type(value), _THEMSELVES):
        return
    key = id(value), id(value)
    if key in passed and passed[key][0] >= depth:
        return
    passed[key] = depth, value, value
    held = state_of(value) or ()
    if _PLAIN_VALUES.issuperset(map(type, held)):
        found += held
        return
    inside = deeper(value, depth)
    for item in held:
        _collect(item, inside, found, passed)


def is_flat(value: Any) -> bool:
    """Whether ``value`` is a plain list, tuple or dict of numbers, strings and the like alone."""
    if type(value) not in _PLAIN_CONTAINERS or not _PLAIN_VALUES.issuperset(map(type, value)):
        return False
    return type(value) is not dict or _PLAIN_VALUES.issuperset(map(type, value.values()))


def same_held(before: list[Any], after: list[Any]) -> bool:
    """Whether two lists from :func:`all_held` are the same, each pair without its contents."""
    return len(before) == len(after) and all(
        then is now or (type(then) is type(now) and same_value(then, now, depth=0))
        for then, now in zip(before, after, strict=True)
    )


def may_grow(value: Any) -> bool:
    """Whether ``value`` can get contents later, even if it is empty now."""
    if isinstance(value, _THEMSELVES):
        return False
    return isinstance(value, Mapping | list | set | deque) or hasattr(value, "__dict__")


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of a plain object, from its ``__dict__`` and its slots."""
    held = getattr(value, "__dict__", None)
    found = dict(held) if isinstance(held, dict) else {}
    found.update({n: getattr(value, n) for n in slots_of(type(value)) if hasattr(value, n)})  # type: ignore[arg-type]
    return found


@functools.lru_cache(maxsize=1024)
def slots_of(class_: type[Any]) -> tuple[str, ...]:
    """Return the names of the slots that objects of ``class_`` have."""
    names: list[str] = []
    for base in class_.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


# The size of an object that has only a dict and a list of weak references.
_PLAIN_SIZE = object.__basicsize__ + 2 * tuple.__itemsize__
_HEAP_TYPE = 1 << 9
_NO_OBJECTS = (*CONTAINERS, torch.Tensor, nn.Module, type, types.ModuleType, enum.Enum)


def holds_all_in_dict(kind: type[Any]) -> bool:
    """Whether ``kind`` is a pure Python class whose objects keep all state in ``__dict__``."""
    if issubclass(kind, _NO_OBJECTS) or kind.__itemsize__:
        return False
    if slots_of(kind):  # type: ignore[arg-type]
        return False
    if kind.__basicsize__ > _PLAIN_SIZE or not kind.__dictoffset__:
        return False
    return all(c.__flags__ & _HEAP_TYPE for c in kind.__mro__ if c is not object)


def state_of(value: Any) -> list[Any] | None:
    """Return the state that distinguishes ``value`` from other values of its type.

    The state is the contents of the value, or what pickling would save. None means that the state
    is unknown: such a value equals only itself.
    """
    if type(value) in _PLAIN_VALUES:
        return []
    if type(value) in _PLAIN_CONTAINERS or type(value) is OrderedDict:
        return contents(value)
    # The proxy of a data-dependent value refuses isinstance.
    if issubclass(type(value), fx.Proxy):
        return None
    reader = reader_of(type(value))
    # Equal references may refer to two tensors, as those of a recurrent layer and of its copy.
    if reader is not None and not isinstance(value, weakref.ReferenceType):
        return reader.read(value)
    if isinstance(value, numpy.ndarray):
        return [value.dtype.str, value.shape, value.tobytes(), *_mask_of(value)]
    if isinstance(value, torch.Generator):
        return [value.get_state().numpy().tobytes()]
    if isinstance(value, numpy.random.Generator):
        return [pickle.dumps(value.bit_generator.state)]
    if isinstance(value, numpy.random.RandomState):
        return [pickle.dumps(value.get_state(legacy=False))]
    if isinstance(value, random.Random):
        return [repr(value.getstate())]
    if isinstance(value, queue.SimpleQueue):
        return [value.qsize()]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords, vars(value)]
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, (*CONTAINERS, *_THEMSELVES)):
        return contents(value)
    held = contents(value)
    if held or hasattr(value, "__dict__"):
        return held
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # classes that cannot be pickled raise errors of any type
        return None
    if isinstance(reduced, str):
        return [reduced]
    return [list(part) if isinstance(part, Iterator) else part for part in reduced]
