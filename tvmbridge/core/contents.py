"""Contents: what attributes and arguments hold, and whether two are the same to forward."""

from __future__ import annotations

import enum
import functools
import math
import pickle
import queue
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import fx, nn

# No value at all.
MISSING: Any = enum.Enum("Missing", "MISSING").MISSING  # type: ignore[attr-defined]
# Stands, where a value is expected, for any tensor.
ANY_TENSOR: Any = enum.Enum("Tensor", "ANY_TENSOR").ANY_TENSOR  # type: ignore[attr-defined]
# How deep objects are looked into.
DEPTH = 4
# Two of these are the same only where they are one object. Modules are watched by themselves, and
# the others hold nothing that could change.
_THEMSELVES = (
    torch.Tensor,
    nn.Module,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    enum.Enum,
)
CONTAINERS = (Mapping, list, tuple, set, frozenset, deque)
# What they hold is read past their class: some have no length, though they hold much.
_SEQUENCES: tuple[Any, ...] = (list, tuple, deque)
_PLAIN_VALUES = frozenset({bool, int, float, complex, str, bytes, range, type(None), type(...)})
_OF_TENSORS = frozenset({torch.Size, torch.dtype, torch.device, torch.layout})


@dataclass(frozen=True)
class PartOf:
    """What is expected of a plain object of which a part matters.

    kind: its class.
    attributes: the values that matter, by name; MISSING where it has none.
    asks: its class decides itself what an attribute is; otherwise the object's dict does.

    Example: of ``config``, whose ``act`` alone was read: ``PartOf(Config, {"act": "relu"})``.
    """

    kind: type
    attributes: dict[str, Any]
    asks: bool = False

    def found(self, value: Any, name: str) -> Any:
        """What ``value``, an object of this kind, has under ``name``."""
        if not self.asks:
            return vars(value).get(name, MISSING)
        try:
            found = getattr(value, name, MISSING)
        except Exception as error:  # of the class of ``value``: any
            return type(error)
        own_method = isinstance(found, types.MethodType) and found.__self__ is value
        return found.__func__ if own_method else found

    def fits(self, value: Any, depth: int = DEPTH) -> bool:
        """Whether ``value`` has what is expected."""
        return type(value) is self.kind and all(
            same_value(self.found(value, name), expected, depth - 1)
            for name, expected in self.attributes.items()
        )


def same_value(a: Any, b: Any, depth: int = DEPTH) -> bool:
    """Whether two attributes mean the same to forward: equal in value, type and sign of zero.

    ``b``, or what it holds, may be a :class:`PartOf` what is expected of ``a``.
    """
    if a is b:
        return True
    if b is ANY_TENSOR:
        return isinstance(a, torch.Tensor)
    if type(b) is PartOf and type(a) is not PartOf:
        return b.fits(a, depth)
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
    if depth == 0:
        return True
    ours, theirs = state_of(a), state_of(b)
    if ours is None or theirs is None:
        return False
    return len(ours) == len(theirs) and all(
        same_value(x, y, depth - 1) for x, y in zip(ours, theirs, strict=True)
    )


def is_constant(value: Any) -> bool:
    """Whether ``value`` is a number, a string, a property of tensors or a tuple of such."""
    if type(value) is tuple:
        return all(map(is_constant, value))
    return type(value) in _PLAIN_VALUES or type(value) in _OF_TENSORS


def contents(value: Any) -> list[Any]:
    """What ``value`` holds, if it is a container or a plain object such as a configuration."""
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


def all_held(value: Any, depth: int = DEPTH) -> list[Any]:
    """``value`` and what it holds, each followed by what that holds, down to ``depth``."""
    held = (state_of(value) or []) if depth else []
    return [value, *(inner for item in held for inner in all_held(item, depth - 1))]


def same_held(before: list[Any], after: list[Any]) -> bool:
    """Whether two lists of :func:`all_held` are the same; what containers hold follows them."""
    return len(before) == len(after) and all(
        then is now or (type(then) is type(now) and same_value(then, now, depth=0))
        for then, now in zip(before, after, strict=True)
    )


def may_grow(value: Any) -> bool:
    """Whether ``value``, should it be empty, may come to hold something."""
    if isinstance(value, _THEMSELVES):
        return False
    return isinstance(value, Mapping | list | set | deque) or hasattr(value, "__dict__")


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of a plain object, in its dict or in slots."""
    held = getattr(value, "__dict__", None)
    found = dict(held) if isinstance(held, dict) else {}
    found.update({n: getattr(value, n) for n in slots_of(type(value)) if hasattr(value, n)})  # type: ignore[arg-type]
    return found


@functools.lru_cache(maxsize=1024)
def slots_of(class_: type[Any]) -> tuple[str, ...]:
    """The names of the slots that objects of ``class_`` have."""
    names: list[str] = []
    for base in class_.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


# Of an object with a dict, and weak references to it.
_PLAIN_SIZE = object.__basicsize__ + 2 * tuple.__itemsize__
_HEAP_TYPE = 1 << 9
_NO_OBJECTS = (*CONTAINERS, torch.Tensor, nn.Module, type, types.ModuleType, enum.Enum)


def holds_all_in_dict(kind: type[Any]) -> bool:
    """Whether a class is written in Python alone, its objects having all that they hold in their
    dict."""
    if issubclass(kind, _NO_OBJECTS) or kind.__itemsize__:
        return False
    if slots_of(kind):  # type: ignore[arg-type]
        return False
    if kind.__basicsize__ > _PLAIN_SIZE or not kind.__dictoffset__:
        return False
    return all(c.__flags__ & _HEAP_TYPE for c in kind.__mro__ if c is not object)


def state_of(value: Any) -> list[Any] | None:
    """What tells ``value`` from others of its type: its contents, or what pickling would keep.

    None: it does not say, so that it is the same as itself alone.
    """
    # The proxy of a data-dependent value refuses to be asked for its class.
    if issubclass(type(value), fx.Proxy):
        return None
    if isinstance(value, numpy.ndarray):
        return [value.dtype.str, value.shape, value.tobytes()]
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
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, (*CONTAINERS, *_THEMSELVES)):
        return contents(value)
    held = contents(value)
    if held or hasattr(value, "__dict__") or type(value) in _PLAIN_VALUES:
        return held
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # a lock, a file, a generator: each class has errors of its own
        return None
    if isinstance(reduced, str):
        return [reduced]
    return [list(part) if isinstance(part, Iterator) else part for part in reduced]
