"""Watching: choose what a guard compares for each value that forward reads outside the module.

A *guard value* is an :class:`OutsideValue`: where a value is, and what a guard expects there. Data
are compared with a copy. Functions, classes and modules must be identical. Functions must also have
the same code object, since reloading in a notebook replaces only the code of a function.
"""

from __future__ import annotations

import contextvars
import decimal
import functools
import inspect
import logging
import os
import queue
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch
from torch import nn

from tvmbridge.calls.copies import copied_values
from tvmbridge.calls.patches import code_of
from tvmbridge.core.assumptions import Holder, OutsideValue
from tvmbridge.core.contents import (
    CONTAINERS,
    MISSING,
    all_held,
    is_constant,
    same_value,
    state_of,
)
from tvmbridge.core.states import is_weak, reader_of, state_of_context
from tvmbridge.graph_capture.observe.data import is_data, is_object
from tvmbridge.graph_capture.observe.objects import NO_READS
from tvmbridge.graph_capture.observe.sources import LARGEST_REGISTRY, Attributes, Source

# Functions of PyTorch without arguments that read a setting which is not guarded otherwise.
_SETTINGS = frozenset(
    {
        "get_deterministic_debug_mode",
        "get_float32_matmul_precision",
        "get_num_interop_threads",
        "get_num_threads",
        "is_anomaly_check_nan_enabled",
        "is_anomaly_enabled",
        "is_inference_mode_enabled",
        "is_deterministic_algorithms_warn_only_enabled",
        "is_warn_always_enabled",
    }
)
# The same of Python and numpy.
_OF_PYTHON: frozenset[Callable[[], Any]] = frozenset(
    {
        numpy.get_printoptions,
        numpy.geterr,
        sys.get_int_max_str_digits,
        sys.getrecursionlimit,
        sys.getswitchinterval,
    }
)
_DECIMAL = (decimal.Decimal, decimal.getcontext, decimal.localcontext, decimal.setcontext)
_DEFINITIONS = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    functools._lru_cache_wrapper,
    property,
    staticmethod,
    classmethod,
)


def watched(source: Source) -> Iterator[OutsideValue]:
    """Yield the guard values for ``source``.

    Definitions of PyTorch and of Python's standard library are not compared. For a mapping of
    functions, each present entry is compared; new entries are accepted.
    """
    value, owner = source.value, source.owner
    yield from decimal_context(value)
    setting = _setting(source)
    if setting is not None:
        yield setting
    elif value is MISSING:
        yield exactly(source)
    elif (state := _state(source)) is not None:
        yield state
    elif owner is torch:  # It holds dtypes, numbers, and functions that nobody exchanges.
        return
    elif is_data(value) or is_object(value):
        yield _copied(source)
    elif isinstance(owner, types.ModuleType) and _is_of_pythons_library(owner.__name__):
        return
    elif isinstance(value, _DEFINITIONS):
        defined = isinstance(value, type | types.FunctionType | types.BuiltinFunctionType)
        if not defined or not _is_of_pythons_library(value.__module__):
            yield exactly(source)
    elif isinstance(value, nn.Module) and not isinstance(owner, nn.Module):
        yield exactly(source)
    elif isinstance(value, dict) and len(value) <= LARGEST_REGISTRY:
        for key, held in value.items():
            yield exactly(Source(value, value, key, f"{source.label}[{key!r}]", held))
    elif type(value) in (list, tuple, deque) and len(value) <= LARGEST_REGISTRY:
        yield _copied(source)
    elif isinstance(value, slice | memoryview):
        yield exactly(source)


def _state(source: Source) -> OutsideValue | None:
    """Return a guard value for an object whose methods show its state; None for another object.

    The attributes of a thread-local object are guard values of their own.
    """
    value, owner = source.value, source.owner
    if value is logging.getLogger:  # Forward may ask it for any logger.
        every = logging.Logger.manager
        state = NO_READS.state(every)
        return OutsideValue({"": every}, "", "the levels of loggers", state, (id(every), ""))
    if reader_of(type(value)) is None or isinstance(value, threading.local):
        return None
    if is_weak(value):
        return exactly(source)
    of_library = isinstance(owner, types.ModuleType) and _is_of_pythons_library(owner.__name__)
    if of_library and not isinstance(value, logging.Logger):
        return None
    state = NO_READS.state(value)
    return OutsideValue(source.holder, source.name, source.label, state, source.key)


def _is_of_pythons_library(module: Any) -> bool:
    return str(module).partition(".")[0] in sys.stdlib_module_names


def exactly(source: Source) -> OutsideValue:
    """Return a guard value that requires the identical object, whatever its contents."""
    return OutsideValue(
        source.holder, source.name, source.label, source.value, source.key, itself=True
    )


class _State:
    """A :class:`Holder` that returns the contents of an object whose copies are not equal to it."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder

    def get(self, name: str, default: Any) -> Any:
        return state_of(self._holder.get(name, default))


def _copied(source: Source) -> OutsideValue:
    """Return a guard value that compares the value at ``source`` with a copy.

    If a copy of the object is not equal to it, the contents are compared with copies instead.
    """
    holder, value = source.holder, source.value
    copied = copied_values({0: value})[0]
    if isinstance(value, queue.SimpleQueue) or not same_value(copied, value):
        holder = _State(holder)
        held = state_of(value)
        copied = copied_values({0: held})[0]
        if held is not None:  # An item that no copy is equal to is compared by identity.
            pairs = zip(held, copied, strict=True)
            copied = [copy if same_value(each, copy) else each for each, copy in pairs]
    return OutsideValue(holder, source.name, source.label, copied, source.key)


class _Result:
    """A :class:`Holder` that returns the result of a function without arguments.

    It returns the same object again as long as the function's results are equal.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._last: Any = MISSING

    def get(self, name: str, default: Any) -> Any:
        try:
            now = self._function()
        except RuntimeError as error:  # PyTorch's older getters raise where newer ones were used.
            now = str(error)
        if not same_value(now, self._last):
            self._last = now
        return self._last


def _setting(source: Source) -> OutsideValue | None:
    """Return a guard value for the setting that the value at ``source`` reads.

    The value may be a getter of PyTorch, Python or numpy, a context variable, ``os.environ`` or
    ``os.getenv``. Return None if it reads no setting.
    """
    value = source.value
    if value is os.environ or value is os.getenv:
        variables = os.environ._data  # type: ignore[attr-defined]
        label, key = "os.environ", (id(os.environ), "")
        return OutsideValue({"": variables}, "", label, dict(variables), key)
    if isinstance(value, contextvars.ContextVar):
        reader = _Result(functools.partial(value.get, MISSING))
    elif _reads_setting(value):
        reader = _Result(value)
    else:
        return None
    return OutsideValue(reader, "", source.label, reader.get("", None), (id(value), ""))


def decimal_context(value: Any) -> Iterator[OutsideValue]:
    """Yield a guard value for the context of decimals of this thread if ``value`` depends on it."""
    numbers = type(value) is decimal.Decimal or (
        (isinstance(value, CONTAINERS) or is_object(value))
        and any(type(h) is decimal.Decimal for h in all_held(value))
    )
    if numbers or any(value is function for function in _DECIMAL):
        reader = _Result(lambda: state_of_context(decimal.getcontext()))
        key = (id(decimal.getcontext), "")
        yield OutsideValue(reader, "", "decimal.getcontext()", reader.get("", None), key)


def _reads_setting(value: Any) -> bool:
    """Whether ``value`` is a function without arguments that returns a setting."""
    if not isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return False
    if value in _OF_PYTHON:
        return True
    if (value.__module__ or "").startswith("torch.backends"):
        return value.__name__.endswith("_enabled") and not value.__name__.startswith("set_")
    return value.__name__ in _SETTINGS


def defaults(value: Any) -> Iterator[OutsideValue]:
    """Yield guard values for mutable parameter defaults of the functions in ``value``."""
    for function in _functions(value):
        for name in ("__defaults__", "__kwdefaults__"):
            held = getattr(function, name) or ()
            by_name = isinstance(held, dict)  # The dict itself may change.
            each = held.values() if isinstance(held, dict) else held
            if any((by_name or not is_constant(d)) and (is_data(d) or is_object(d)) for d in each):
                label = f"a default of {function.__name__}"
                yield _copied(Source(function, Attributes(function), name, label, held))


class Codes:
    """A :class:`Holder` that checks code and parameter defaults of many functions in one guard.

    ``get`` returns the holder itself if all functions are unchanged, otherwise the first function
    that has changed.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        functions = [f for value in values for f in _functions(value)]
        self.before = [(f, code_of(f), f.__defaults__) for f in functions]

    def get(self, name: str, default: Any) -> Any:
        for function, code, before in self.before:  # This runs at every call.
            if code_of(function) is not code or function.__defaults__ is not before:
                return function
        return self

    def watched(self) -> OutsideValue:
        """Return the guard value: ``get`` must return this object."""
        return exactly(Source(self, self, "", "the code of a function", self))


_WITHOUT_FUNCTIONS = frozenset({bool, int, float, str, type(None), dict, list, tuple, set})


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """Yield the Python functions that ``value`` is or wraps (a property, partial or decorator)."""
    if type(value) in _WITHOUT_FUNCTIONS:
        return
    parts: list[Any]
    if type(value) is types.FunctionType:  # the common case, faster than getattr_static
        parts = [value.__dict__.get("__wrapped__"), value]
    elif isinstance(value, property):
        parts = [value.fget]
    elif isinstance(value, functools.partial):
        parts = [value.func]
    elif isinstance(value, types.MethodType | staticmethod | classmethod):
        parts = [value.__func__, getattr(value, "__wrapped__", None)]
    else:
        # ``getattr`` may run user code, and lazy proxies of missing packages raise an error.
        parts = [inspect.getattr_static(value, "__wrapped__", None), value]
    yield from (part for part in parts if isinstance(part, types.FunctionType))
