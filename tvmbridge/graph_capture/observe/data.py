"""Data: decide which values outside the module are compared by content in guards."""

from __future__ import annotations

import argparse
import array
import datetime
import decimal
import fractions
import io
import pathlib
import queue
import random
import re
import sys
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import nn

from tvmbridge.core.contents import (
    CONTAINERS,
    DEPTH,
    all_held,
    attributes_of,
    deeper,
    holds_all_in_dict,
    is_constant,
    may_grow,
)

_GENERATORS = (numpy.random.Generator, numpy.random.RandomState, random.Random, torch.Generator)
_FILLED = (numpy.ndarray, torch.Tensor, array.array, bytearray, queue.Queue, queue.SimpleQueue)
# Values of classes outside the user's code that are compared like numbers and strings.
_VALUES: tuple[type, ...] = (
    numpy.generic,
    decimal.Decimal,
    fractions.Fraction,
    datetime.date,
    datetime.time,
)
_VALUES += (datetime.timedelta, pathlib.PurePath, re.Pattern)
_PLAIN = (types.SimpleNamespace, argparse.Namespace)


def is_data(value: Any, depth: float = DEPTH) -> bool:
    """Whether ``value`` is a constant, a tensor, a random generator, or a container of data.

    An empty container that can grow counts, too. The keys of a mapping do not count: a registry of
    functions has strings as keys. Plain objects that hold data count as data within a container.
    """
    if is_constant(value) or isinstance(value, (*_GENERATORS, *_FILLED, *_VALUES)):
        return True
    if depth <= 0 or not isinstance(value, CONTAINERS) or value is sys.modules:
        return False
    held = value.values() if isinstance(value, Mapping) else value
    return (may_grow(value) and not held) or any(
        _has_data(h, deeper(value, depth)) for h in list(held)
    )


def is_object(value: Any, depth: float = DEPTH) -> bool:
    """Whether ``value`` is a plain object of a user's class that holds data.

    The data may be in its attributes, in attributes of its class, or in an object that it holds.
    An object without attributes counts as well if it can get some.
    """
    if depth <= 0 or isinstance(value, CONTAINERS):
        return False
    if isinstance(value, (type, torch.Tensor, nn.Module, types.ModuleType)):
        return False
    if not is_plain_class(type(value)):
        return False
    of_classes = (v for c in type(value).__mro__ if is_of_users(c) for v in _own(c).values())
    held = attributes_of(value)
    may_come = not held and may_grow(value)
    return may_come or any(_has_data(h, depth - 1) for h in (*held.values(), *of_classes))


def _has_data(value: Any, depth: float) -> bool:
    return is_data(value, depth) or is_object(value, depth)


def holds_iterator(value: Any) -> bool:
    """Whether ``value`` is an iterator, or a container or a user's object that holds one.

    An object whose whole state is in its attributes is no iterator, though its class may have a
    ``__next__``: its attributes are compared and restored.
    """
    looked_into = isinstance(value, CONTAINERS) or is_plain_class(type(value))
    held = all_held(value) if looked_into else [value]
    return any(
        isinstance(h, Iterator)
        and not isinstance(h, io.IOBase)
        and type(h) not in weakref.ProxyTypes  # A proxy has a ``__next__`` of any object.
        and not (is_of_users(type(h)) and holds_all_in_dict(type(h)))
        for h in held
    )


def is_plain_class(cls: type) -> bool:
    """Whether objects of ``cls`` are plain objects: of a user's class, or simple namespaces."""
    return is_of_users(cls) or cls in _PLAIN


def is_of_users(cls: type) -> bool:
    """Whether ``cls`` is defined outside PyTorch, numpy and Python's standard library."""
    package = str(cls.__module__).partition(".")[0]
    return package not in ("torch", "numpy") and package not in sys.stdlib_module_names


def data_of(cls: type) -> dict[str, Any]:
    """Return the data among the attributes that ``cls`` itself defines, by name."""
    return {name: value for name, value in _own(cls).items() if is_data(value)}


def _own(cls: type) -> dict[str, Any]:
    return {n: v for n, v in vars(cls).items() if not (n.startswith("__") and n.endswith("__"))}
