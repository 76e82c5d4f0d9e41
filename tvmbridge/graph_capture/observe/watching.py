"""Watching: what is kept of the places that a mention leads past, for a guard to compare."""

from __future__ import annotations

import contextvars
import functools
import os
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tvmbridge.core.assumptions import Holder, OutsideValue
from tvmbridge.core.contents import MISSING, same_value, state_of
from tvmbridge.graph_capture.observe.data import is_data, is_object
from tvmbridge.graph_capture.observe.definitions import exactly, named
from tvmbridge.graph_capture.observe.sources import Place
from tvmbridge.graph_capture.trace.standins import copied_values

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


def values_at(passed: Sequence[Place]) -> Iterator[OutsideValue]:
    """The value at the end of a mention, and whether the objects before it are others now."""
    *before, place = passed
    found = _setting(place)
    # What torch holds itself are dtypes and numbers.
    of_torch = bool(before) and before[-1].value is torch
    if found is None and not of_torch and (is_data(place.value) or is_object(place.value)):
        found = watched(place)
    ends = [found] if found is not None else list(named(passed))
    yield from ends
    for each in before if ends else ():
        if not isinstance(each.value, types.ModuleType):
            yield exactly(each)


class _State:
    """What an object holds, of one whose class does not copy it faithfully."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder

    def get(self, name: str, default: Any) -> Any:
        return state_of(self._holder.get(name, default))


def watched(place: Place) -> OutsideValue:
    """The value at ``place``, with a copy that no change reaches."""
    holder, value = place.holder, place.value
    copied = copied_values({0: value})[0]
    if not same_value(copied, value):
        holder = _State(holder)
        copied = copied_values({0: state_of(value)})[0]
    return OutsideValue(holder, place.name, place.label, copied, place.key)


class _Result:
    """What a function without arguments returns: the same object as long as it is equal."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._last: Any = MISSING

    def get(self, name: str, default: Any) -> Any:
        now = self._function()
        if not same_value(now, self._last):
            self._last = now
        return self._last


def _setting(place: Place) -> OutsideValue | None:
    """A setting of PyTorch or of the process that is read by what stands at ``place``."""
    value = place.value
    if value is os.environ or value is os.getenv:
        variables = os.environ._data  # type: ignore[attr-defined]
        label, key = "os.environ", (id(os.environ), "")
        return OutsideValue({"": variables}, "", label, dict(variables), key)
    reader = None
    if isinstance(value, contextvars.ContextVar):
        reader = _Result(functools.partial(value.get, MISSING))
    elif _reads_setting(value):
        reader = _Result(value)
    if reader is None:
        return None
    return OutsideValue(reader, "", place.label, reader.get("", None), (id(value), ""))


def _reads_setting(value: Any) -> bool:
    """Whether ``value`` is a function of PyTorch, without arguments, that returns a setting."""
    if not isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return False
    if (value.__module__ or "").startswith("torch.backends"):
        return value.__name__.endswith("_enabled") and not value.__name__.startswith("set_")
    return value.__name__ in _SETTINGS
