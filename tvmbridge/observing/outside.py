"""Outside: the globals, free variables, class attributes and settings that forward reads.

They stand in compiled code as constants, as attributes of the module do, and are watched with them.
A function says by its bytecode what it may read; which functions run is seen while forward is
observed.
"""

from __future__ import annotations

import contextvars
import functools
import io
import os
import random
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy
import torch
from torch import nn

from tvmbridge.libraries import SAME_WHEN_COMPILED
from tvmbridge.observing.contents import (
    MISSING,
    same_value,
    state_of,
)
from tvmbridge.observing.data import data_of, is_data, is_object, is_of_users
from tvmbridge.observing.definitions import Codes, exactly, named, of_class
from tvmbridge.observing.executed import Executed, executed_functions
from tvmbridge.observing.mentions import Mention, Origin
from tvmbridge.observing.places import Cells, Place, bind, places
from tvmbridge.reads import Holder, OutsideValue, Question
from tvmbridge.tracing.standins import copied_values

# Tracing switches them off meanwhile.
_EXCHANGED = (torch.backends.mkldnn, torch.backends.nnpack, torch.backends.cudnn)
_ABOUT_COMPILERS = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch.compiler.is_exporting,
    torch._utils.is_compiling,
)
# Methods that nobody names: of modules, of autograd's functions, and of objects that are called.
_UNNAMED = frozenset({"forward", "backward", "setup_context", "__call__"})
# Functions of PyTorch without arguments that read a setting which is not guarded otherwise.
_SETTINGS = frozenset(
    {
        "get_deterministic_debug_mode",
        "get_float32_matmul_precision",
        "get_num_interop_threads",
        "get_num_threads",
        "is_anomaly_check_nan_enabled",
        "is_anomaly_enabled",
        "is_deterministic_algorithms_warn_only_enabled",
        "is_warn_always_enabled",
    }
)


class OutsideReads:
    """Collects what the functions of users that run may read outside of the module.

    ``asks`` is what they may ask of tensors, and ``complaints`` what compiled code cannot repeat.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._classes = {
            cls: copied_values(data_of(cls))
            for cls in {base: None for m in module.modules() for base in type(m).__mro__}
            if is_of_users(cls)
        }
        self._values: dict[tuple[int, str], OutsideValue] = {}
        self._names: set[str] = set()
        self._met: set[type] = set()
        self._cells: list[Cells] = []
        # Code of functions within functions that ran, whose free variables are made at each run.
        self._inner: set[int] = set()
        self.asks: set[Question] = set()
        self.complaints: list[str] = []

    def collecting(self) -> AbstractContextManager[None]:
        """Within it functions that run in this thread are looked at before they do."""
        return executed_functions(self._note)

    def _note(self, executed: Executed) -> None:
        self._names |= set(executed.code.co_names)
        if executed.mentions.compares_identity:
            self.asks.add(Question.IDENTITY)
        same_anyway = str(executed.globals.get("__name__")).startswith(SAME_WHEN_COMPILED)
        own = id(executed.code) not in self._inner
        self._inner.update(map(id, _codes_within(executed.code)))
        for mention in executed.mentions.found:
            if mention.origin is Origin.FREE and not own:
                continue
            passed = places(executed, mention)
            if passed:
                self._look_at(passed)
                if any(passed[-1].value is f for f in _ABOUT_COMPILERS) and not same_anyway:
                    self.asks.add(Question.COMPILED)
            elif mention == Mention(Origin.GLOBAL, "id"):
                self.asks.add(Question.IDENTITY)

    def _look_at(self, passed: Sequence[Place]) -> None:
        self._met |= {p.value if isinstance(p.value, type) else type(p.value) for p in passed}
        value = passed[-1].value
        if value is torch.default_generator:
            self.complaints.append("uses torch.default_generator")
        elif isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            self.complaints.append(f"reads the iterator {passed[-1].label}")
        elif _is_class_of_some_tensors(value):
            self.asks.add(Question.CLASS)
        for found in _values(passed):
            if isinstance(found.holder, Cells):
                self._cells.append(found.holder)
            self._values.setdefault(found.key, found)
            if any(place.value in _EXCHANGED for place in passed[:-1]):
                self.complaints.append(f"reads {found.label}, which is exchanged in a trace,")

    def values(self) -> tuple[OutsideValue, ...]:
        """What was collected, and the class attributes that are mentioned.

        The classes are those of the module, of its submodules, and of objects that forward reads.
        """
        modules = list(self._module.modules())
        classes = {type(m) for m in modules}
        classes |= {type(v) for m in modules for v in vars(m).values()}
        for found in _of_classes(classes | self._met, self._names | _UNNAMED):
            self._values.setdefault(found.key, found)
        codes = Codes(v.expected for v in self._values.values() if v.itself).watched()
        return (*self._values.values(), codes)

    def changed(self) -> tuple[str, ...]:
        """What is not as it was found; generators of random numbers are put back."""
        changed = bind(self._cells)
        changed += [value.label for value in self._values.values() if _has_changed(value)]
        for cls, before in self._classes.items():
            now = data_of(cls)
            written = {n for n in {**before, **now} if not _same(before, now, n)}
            changed += [f"{cls.__name__}.{name}" for name in written]
        restore_generators(self._values.values())
        return tuple(dict.fromkeys(changed))


def _codes_within(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes_within(constant)


def _is_class_of_some_tensors(value: Any) -> bool:
    return isinstance(value, type) and value is not torch.Tensor and issubclass(value, torch.Tensor)


def _same(before: Mapping[str, Any], now: Mapping[str, Any], name: str) -> bool:
    return same_value(before.get(name, MISSING), now.get(name, MISSING))


def _has_changed(found: OutsideValue) -> bool:
    value = found.holder.get(found.name, MISSING)
    return value is not found.expected if found.itself else not same_value(value, found.expected)


def restore_generators(values: Iterable[OutsideValue]) -> None:
    """Give the generators of random numbers among ``values`` the states back that they had."""
    for found in values:
        value, expected = found.holder.get(found.name, MISSING), found.expected
        if isinstance(value, numpy.random.Generator):
            value.bit_generator.state = expected.bit_generator.state
        elif isinstance(value, numpy.random.RandomState):
            value.set_state(expected.get_state())
        elif isinstance(value, random.Random):
            value.setstate(expected.getstate())


def _of_classes(classes: Iterable[type], names: set[str]) -> Iterator[OutsideValue]:
    """The data among the attributes of users' classes that are called by one of ``names``."""
    for cls in {base: None for c in classes for base in c.__mro__}:
        if not is_of_users(cls):
            continue
        for name in names & cls.__dict__.keys():
            if is_data(cls.__dict__[name]):
                label = f"{cls.__name__}.{name}"
                yield _watched(Place(cls, cls.__dict__, name, label, cls.__dict__[name]))
        yield from of_class(cls, names)


def _values(passed: Sequence[Place]) -> Iterator[OutsideValue]:
    """The value at the end of a mention, and whether the objects before it are others now."""
    *before, place = passed
    found = _setting(place)
    # What torch holds itself are dtypes and numbers.
    of_torch = bool(before) and before[-1].value is torch
    if found is None and not of_torch and (is_data(place.value) or is_object(place.value)):
        found = _watched(place)
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


def _watched(place: Place) -> OutsideValue:
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
