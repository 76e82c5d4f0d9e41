"""Outside: the globals, free variables, class attributes and settings that forward reads.

They stand in compiled code as constants, as attributes of the module do, and are watched with them.
A function says by its bytecode what it may read; which functions run is seen while forward is
observed.
"""

from __future__ import annotations

import builtins
import functools
import operator
import random
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from tvmbridge.core.assumptions import OutsideValue, Question
from tvmbridge.core.contents import (
    MISSING,
    same_value,
)
from tvmbridge.core.libraries import SAME_WHEN_COMPILED
from tvmbridge.graph_capture.observe.data import data_of, is_data, is_object, is_of_users
from tvmbridge.graph_capture.observe.definitions import Codes, defaults, exactly, of_class
from tvmbridge.graph_capture.observe.executed import Executed, executed_functions, is_library
from tvmbridge.graph_capture.observe.mentions import Ending, Origin
from tvmbridge.graph_capture.observe.namespaces import Namespace, searched
from tvmbridge.graph_capture.observe.snapshots import Snapshots, holds_iterator
from tvmbridge.graph_capture.observe.sources import Cells, Place, bind, places
from tvmbridge.graph_capture.observe.watching import values_at, watched
from tvmbridge.graph_capture.trace.standins import copied_values

# Tracing switches them off meanwhile.
_EXCHANGED = (torch.backends.mkldnn, torch.backends.nnpack, torch.backends.cudnn)
_ABOUT_COMPILERS = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch.compiler.is_exporting,
    torch._utils.is_compiling,
)
_ABOUT_IDENTITY = (builtins.id, operator.is_, operator.is_not)
# Methods that nobody names: of modules, of autograd's functions, and of objects that are called.
_UNNAMED = frozenset({"forward", "backward", "setup_context", "__call__"})


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
        self._snapshots = Snapshots()
        self._namespaces: dict[int, tuple[Namespace, frozenset[str]]] = {}
        self.asks: set[Question] = set()
        self.complaints: list[str] = []
        of_classes = (f for cls in self._classes for f in vars(cls).values())
        for value in (*of_classes, *(v for m in module.modules() for v in vars(m).values())):
            self._watch_defaults(value)

    def collecting(self) -> AbstractContextManager[None]:
        """Within it functions that run in this thread are looked at before they do."""
        return executed_functions(self._note)

    def _note(self, executed: Executed) -> None:
        mentions = executed.mentions
        self._names |= {*executed.code.co_names, *mentions.strings}
        if mentions.compares_identity:
            self.asks.add(Question.IDENTITY)
        same_anyway = str(executed.globals.get("__name__")).startswith(SAME_WHEN_COMPILED)
        own = id(executed.code) not in self._inner
        self._inner.update(map(id, _codes_within(executed.code)))
        for mention in mentions.found:
            if mention.origin is Origin.FREE and not own:
                continue
            passed = places(executed, mention)
            if passed:
                self._look_at(passed, mention.ending)
                if not same_anyway:
                    self._note_tracing(passed[-1].value)
                for namespace in searched(executed, mention, passed):
                    self._watch_all(namespace, mentions.strings)

    def _note_tracing(self, value: Any) -> None:
        if any(value is f for f in _ABOUT_COMPILERS):
            self.asks.add(Question.COMPILED)
        elif value is FakeTensor:
            self.complaints.append("asks whether tensors are fake, which only those of a trace are")

    def _look_at(self, passed: Sequence[Place], ending: Ending) -> None:
        self._met |= {p.value if isinstance(p.value, type) else type(p.value) for p in passed}
        label, value = passed[-1].label, passed[-1].value
        if value is MISSING:
            self._keep(exactly(passed[-1]))
            return
        if value is torch.default_generator:
            self.complaints.append("uses torch.default_generator")
        elif holds_iterator(value):
            self.complaints.append(f"reads the iterator {label}")
        elif any(value is f for f in _ABOUT_IDENTITY):
            self.asks.add(Question.IDENTITY)
        elif _is_class_of_some_tensors(value):
            self.asks.add(Question.CLASS)
        self._note_comparison(label, value, ending)
        found = list(values_at(passed))
        for each in found:
            self._keep(each)
            if any(place.value in _EXCHANGED for place in passed[:-1]):
                self.complaints.append(f"reads {each.label} (which a trace exchanges)")
        if not found:
            self._snapshots.take(passed)
            if ending is Ending.WRITTEN:
                self._keep(exactly(passed[-1]))
        if isinstance(value, functools._lru_cache_wrapper):
            self._note_cached(value.__wrapped__)
        self._watch_defaults(value)

    def _note_comparison(self, label: str, value: Any, ending: Ending) -> None:
        """What a trace answers otherwise than a call: its tensors are others, of another class."""
        compared = ending in (Ending.COMPARED, Ending.IDENTIFIED)
        if compared and isinstance(value, type) and issubclass(value, torch.Tensor):
            self.complaints.append(f"compares the class of a tensor with {label} (use isinstance)")
        elif ending is Ending.IDENTIFIED and isinstance(value, torch.Tensor):
            self.complaints.append(f"asks whether a tensor is {label}")

    def _note_cached(self, function: Any) -> None:
        """Look at a function whose results are kept, which may not run."""
        if isinstance(function, types.FunctionType) and not is_library(function.__module__):
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            free = {name: cell.cell_contents for name, cell in cells}
            self._note(Executed(function.__code__, function.__globals__, free))

    def _keep(self, found: OutsideValue) -> None:
        if isinstance(found.holder, Cells):
            self._cells.append(found.holder)
        self._values.setdefault(found.key, found)

    def _watch_all(self, namespace: Namespace, strings: Iterable[str]) -> None:
        for place in namespace.missing(strings):
            self._keep(exactly(place))
        names = frozenset(namespace.values)
        if id(namespace.values) not in self._namespaces:
            self._namespaces[id(namespace.values)] = namespace, names
            for place in namespace.places():
                for found in values_at([place]):
                    self._keep(found)

    def _watch_defaults(self, value: Any) -> None:
        for place in defaults(value):
            self._keep(watched(place))

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
        changed += self._snapshots.changed()
        for (label, values), names in self._namespaces.values():
            changed += [f"{label}{name}" for name in values if name not in names]
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
            if is_data(cls.__dict__[name]) or is_object(cls.__dict__[name]):
                label = f"{cls.__name__}.{name}"
                yield watched(Place(cls, cls.__dict__, name, label, cls.__dict__[name]))
        yield from of_class(cls, names)
