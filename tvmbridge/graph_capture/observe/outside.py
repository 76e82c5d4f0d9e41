"""Outside: record the globals, free variables, class attributes and settings that forward reads.

Their values become constants of compiled code, like attributes of the module, and guards compare
them. An observation of forward shows which functions run. The code of a function has the names
that it may read.
"""

from __future__ import annotations

import builtins
import functools
import operator
import random
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import nn

from tvmbridge.calls.own_calls import OwnCalls
from tvmbridge.core.assumptions import OutsideValue, Question
from tvmbridge.core.contents import MISSING, is_constant, same_value
from tvmbridge.core.errors import CaptureError
from tvmbridge.core.libraries import SAME_WHEN_COMPILED
from tvmbridge.core.methods import MethodOf
from tvmbridge.core.states import StateOf
from tvmbridge.core.torch_private import FakeTensor, is_compiling
from tvmbridge.graph_capture.observe.closures import Closures
from tvmbridge.graph_capture.observe.executed import (
    Executed,
    codes_within,
    executed_functions,
    is_library,
)
from tvmbridge.graph_capture.observe.hooks import traced_hooks
from tvmbridge.graph_capture.observe.iterators import Iterators
from tvmbridge.graph_capture.observe.leaks import holds_fakes, remove_fakes
from tvmbridge.graph_capture.observe.names import SEARCHING, Names, asks_own_id, asks_type
from tvmbridge.graph_capture.observe.objects import ObjectReads
from tvmbridge.graph_capture.observe.sources import (
    Attributes,
    Source,
    below,
    bound_values,
    free_variables,
    names_added,
    names_in,
    namespaces,
    roots,
)
from tvmbridge.graph_capture.observe.strides import strides_asked
from tvmbridge.graph_capture.observe.undo import current_undo
from tvmbridge.graph_capture.observe.unseen import backward_functions, gradient_functions
from tvmbridge.graph_capture.observe.watching import (
    Codes,
    decimal_context,
    defaults,
    exactly,
    watched,
)

# A trace disables these backends, so forward would read other settings than in a call.
_EXCHANGED = (torch.backends.mkldnn, torch.backends.nnpack, torch.backends.cudnn)
_ABOUT_COMPILERS = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch.compiler.is_exporting,
    is_compiling,
)
_ABOUT_IDENTITY = (builtins.id, operator.is_, operator.is_not)
_EMPTIED = (dict, OrderedDict, set, list, tuple)
_KEYED = (dict, set, frozenset, weakref.WeakKeyDictionary, weakref.WeakSet)
# A function that uses one of these names may read attributes past the recorder on the class.
_PAST_CLASSES = frozenset({"__getattribute__", "getattr_static"})
# Methods that PyTorch and Python call, so that user code need not name them.
_UNNAMED = frozenset({"forward", "backward", "setup_context", "__call__"})


class OutsideReads:
    """Collect the values outside the module that the user's functions may read while they run.

    - ``asks``: the properties of tensors that the functions may read.
    - ``complaints``: descriptions of reads that compiled code cannot repeat.
    - ``types``: functions that may ask for the type of a value by ``type``.
    - ``executed``: the code of the user's functions that ran, by id.
    - ``own``: this thread's calls of random generators and of setters of settings that all threads
      share.
    """

    def __init__(self, module: nn.Module, objects: ObjectReads, needs_grad: bool = False) -> None:
        self._needs_grad = needs_grad
        # The method by which a function of gradients asks for strides, or None.
        self._asked: str | None = None
        self.asks: set[Question] = set()
        self.complaints: list[str] = []
        self.types: list[str] = []
        self.executed: dict[int, types.CodeType] = {}
        self.own = OwnCalls()
        self._objects = objects
        self._undo = current_undo()
        self._of = type(module).__name__
        self._iterators = Iterators()
        self._closures = Closures()
        # Values of attributes of the module and of its classes.
        self._attributes: list[Any] = []
        self._sources: dict[tuple[int, str], Source] = {}
        self._values: dict[tuple[int, str], OutsideValue] = {}
        self._names = _UNNAMED | ({module.method} if isinstance(module, MethodOf) else set())
        # By id: an object that attributes may be looked up in, with the names it had before, and a
        # cached function with its number of misses before.
        self._namespaces: dict[int, tuple[Source, frozenset[str]]] = {}
        self._caches: dict[int, tuple[Any, int]] = {}
        # Code of functions defined in functions that ran: each run creates their free variables.
        self._inner: set[int] = set()
        known = set[int]()
        for name, value in [i for m in module.modules() for i in (("", m), *vars(m).items())]:
            if type(value).__module__.startswith("tvmbridge.") and not isinstance(value, nn.Module):
                continue  # the dispatcher of the module, which a copy that is traced does not have
            # Most values are constants, or containers of PyTorch's own, which are empty.
            if is_constant(value) or id(value) in known:
                continue
            known.add(id(value))
            self._attributes.append(value)
            if type(value) in _EMPTIED and not value:
                continue
            self._keep(defaults(value))
            self._keep(decimal_context(value))
            named = isinstance(value, types.FunctionType | types.ModuleType)
            if isinstance(value, types.FunctionType):
                self._keep([exactly(Source(value, {"": value}, "", name, value))])
            label = value.__name__ if isinstance(value, types.FunctionType) else name
            for source in bound_values(Source(None, {}, "", label, value)):
                # A stand-in of the module has copies of other values.
                if isinstance(source.value, type | types.FunctionType):
                    self._look_at(source)
            met = Source(None, {}, "", label, value if named else type(value))
            for source in self._new_namespaces(met):
                self._attributes += vars(source.value).values()
                for member in vars(source.value).values():
                    self._keep(defaults(member))
                for each in below(source, self._names):
                    self._look_at(each)
        for hook in [h for m in module.modules() for h, _ in traced_hooks(m)]:
            if not isinstance(hook, types.FunctionType):
                continue
            held = {"": hook}
            self._keep(defaults(hook))
            self._keep([exactly(Source(held, held, "", f"the hook {hook.__name__}", hook))])

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside this context, record the reads of each user's function before its first run."""
        try:
            with executed_functions(self._note_function, self.own, self._note_applied):
                yield
        finally:
            # They may hold tensors that forward has made.
            self._closures.forget()

    def _note_function(self, executed: Executed) -> None:
        with self._objects.paused():
            self.note(executed)
        self._refuse_strides()
        iterator = self._iterators.used(self._names, bool(self._names & SEARCHING))
        if iterator is not None:  # No later step could put back what the function takes from it.
            what = f"reads the iterator {iterator}"
            self.complaints.append(what)  # A forward may catch the error.
            raise CaptureError(
                f"forward of {self._of} {what}, which compiled code would not do at each call"
            )

    def _note_applied(self, kind: type) -> None:
        """Record what a custom autograd function may read, whatever holds it."""
        if is_library(kind.__module__):
            return
        if "<locals>" in kind.__qualname__:  # A record would keep the tensors of its closures.
            self._note_strides(kind)
        else:
            with self._objects.paused():
                self._look_at(Source(kind, {"": kind}, "", kind.__name__, kind))
        self._refuse_strides()

    def _note_strides(self, value: Any) -> None:
        for function in backward_functions(value) if self._needs_grad else ():
            self._asked = self._asked or strides_asked(function)

    def _refuse_strides(self) -> None:
        if self._asked is not None:
            raise CaptureError(
                f"the backward of a custom function that {self._of} calls asks for the strides of "
                f"a tensor ({self._asked}), and a trace has gradients with other strides: call "
                "contiguous() without asking, or leave this module to PyTorch"
            )

    def note(self, executed: Executed) -> None:
        """Record what the code of a user's function may read outside of the module."""
        self.executed[id(executed.code)] = executed.code
        names = executed.names
        if asks_type(executed.code):
            self.types.append(executed.code.co_name)
        if executed.of_module is not False and asks_own_id(executed.code):
            self.complaints.append("asks for the id of self, which is another in a trace")
        if names.looked_up & _PAST_CLASSES and executed.code.co_name not in _PAST_CLASSES:
            self._objects.blind = True
        if "globals" in names.globals:
            self._undo.note_names(executed.globals)
        if names.asks_identity:
            self.asks.add(Question.IDENTITY)
        same_anyway = str(executed.globals.get("__name__")).startswith(SAME_WHEN_COMPILED)
        waiting = list(roots(executed))
        if id(executed.code) not in self._inner:
            met = (source.value for source in self._sources.values())
            known = (*executed.globals.values(), *self._attributes, *met)
            waiting += free_variables(executed, self._closures, known)
        self._inner.update(map(id, codes_within(executed.code)))
        # A function may look up attributes of an object that another function has found.
        self._objects.looked_up |= names.looked_up
        new = names.looked_up - self._names
        self._names |= new
        for source, _ in self._namespaces.values():
            waiting += below(source, new)
        passed: set[int] = set()
        while waiting:
            source = waiting.pop()
            is_new = self._look_at(source)
            self._note_questions(source, names, same_anyway)
            if id(source.value) not in passed:
                passed.add(id(source.value))
                waiting += self._below(source, names, is_new)

    def _below(self, source: Source, names: Names, is_new: bool) -> list[Source]:
        value, looked_up = source.value, names.looked_up
        is_module = isinstance(value, types.ModuleType)
        if is_module and not is_library(value.__name__):
            space, label = vars(value), source.label
            if looked_up & SEARCHING:
                looked_up |= space.keys()
            absent = {n for n in names.strings - space.keys() if not n.startswith("__")}
            found = [Source(value, space, n, f"{label}.{n}", MISSING) for n in sorted(absent)]
        else:
            found = []
        found += below(source, looked_up)
        found += bound_values(source)
        for each in self._new_namespaces(source) if is_new else ():
            found += below(each, self._names)
        if found and not is_module and not isinstance(value, type):
            self._keep([exactly(source)])
        return found

    def _new_namespaces(self, source: Source) -> list[Source]:
        new = [s for s in namespaces(source) if id(s.value) not in self._namespaces]
        self._namespaces.update({id(s.value): (s, frozenset(names_in(s))) for s in new})
        for each in new:
            self._undo.note_namespace(each)
        return new

    def _look_at(self, source: Source) -> bool:
        """Record the value at ``source`` unless it is known; return whether it was new."""
        value = source.value
        if source.key in self._sources or isinstance(value, FakeTensor):
            return False
        self._sources[source.key] = source
        self._undo.note_place(source)
        self.own.note_value(value)
        self._iterators.note(source)
        found = list(watched(source))
        self._keep(found, noted=True)
        if isinstance(value, _KEYED) and any(isinstance(key, nn.Module) for key in list(value)):
            # A trace has a stand-in of the module, which is none of the keys.
            self.complaints.append(f"looks modules up in {source.label}")
        if found and any(source.owner is backend for backend in _EXCHANGED):
            why = "PyTorch changes it while it traces forward"
            self.complaints.append(f"reads {source.label} ({why})")
        self._keep(defaults(value))
        if not all(each.itself for each in found):
            self._objects.follow(value)
        if isinstance(value, functools._lru_cache_wrapper):
            self._caches[id(value)] = value, value.cache_info().misses
            self._note_unseen(value.__wrapped__)
        for function in gradient_functions(value):
            self._note_unseen(function)
        self._note_strides(value)
        return True

    def _note_questions(self, source: Source, names: Names, same_anyway: bool) -> None:
        """Record a read of ``source`` that has another result in a trace than in a call.

        A trace has other tensors than a call, of another class.
        """
        label, value = source.label, source.value
        name = label.rpartition(".")[2]
        if value is torch.default_generator:
            self.complaints.append("uses torch.default_generator")
        elif value is builtins.globals or (value is sys.modules and "__name__" in names.globals):
            self.complaints.append(f"searches its own globals by {label} (name what it reads)")
        elif any(value is f for f in _ABOUT_IDENTITY):
            self.asks.add(Question.IDENTITY)
        elif value is FakeTensor and not same_anyway:
            self.complaints.append("asks whether tensors are fake, which only those of a trace are")
        elif any(value is f for f in _ABOUT_COMPILERS) and not same_anyway:
            self.asks.add(Question.COMPILED)
        elif isinstance(value, type) and issubclass(value, torch.Tensor):
            if value is not torch.Tensor:
                self.asks.add(Question.CLASS)
            if name in names.compared:
                what = f"compares the class of a tensor with {label} (use isinstance)"
                self.complaints.append(what)
        elif isinstance(value, torch.Tensor) and name in names.identified:
            self.complaints.append(f"asks whether a tensor is {label}")

    def _note_unseen(self, function: Any) -> None:
        """Record the reads of a function that the observation may not run, and of its functions.

        A cached function does not run if its result is cached, and gradients are computed later.
        """
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or is_library(function.__module__):
            return
        code = function.__code__
        if id(code) in self.executed:
            return
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        held = {
            name: Attributes(cell).get("cell_contents", MISSING) for name, cell in cells.items()
        }
        free = {name: value for name, value in held.items() if value is not MISSING}
        executed = Executed(code, function.__globals__, free)
        self.note(executed)
        self._objects.note_unseen(executed.names)
        named = [executed.globals.get(name) for name in executed.names.globals]
        for value in (*named, *free.values()):
            self._note_unseen(value)

    def _keep(self, found: Iterable[OutsideValue], noted: bool = False) -> None:
        for value in found:
            new = self._values.setdefault(value.key, value) is value
            if new and not value.itself and not noted:
                self._undo.note_contents(value.holder.get(value.name, MISSING))

    def values(self) -> tuple[OutsideValue, ...]:
        """Return the collected values as they were when they were recorded, before any change."""
        found = list(filter(self._counts, self._values.values()))
        codes = Codes(v.expected for v in found if v.itself).watched()
        return (*map(self._narrowed, found), codes)

    def _counts(self, value: OutsideValue) -> bool:
        """Whether forward can depend on ``value``; a logger may be there for its messages alone."""
        state = value.expected
        return not isinstance(state, StateOf) or state.counts(self._names)

    def _narrowed(self, value: OutsideValue) -> OutsideValue:
        """Return ``value`` reduced to the attributes of plain objects that were read."""
        source = self._sources.get(value.key)
        if source is None or value.itself:
            return value
        return replace(value, expected=self._objects.narrowed(source.value, value.expected))

    def changed(self) -> tuple[str, ...]:
        """Return the labels of the changed values, and restore changed random generators."""
        found = filter(self._counts, self._values.values())
        changed = [value.label for value in found if _has_changed(value)]
        changed += [f"{source.label}.{name}" for source, name in self._added()]
        restore_generators(self._values.values())
        return tuple(dict.fromkeys(changed))

    def _added(self) -> Iterator[tuple[Source, str]]:
        for source, names in self._namespaces.values():
            for name in names_added(source, names):
                yield source, name

    def remove_fakes(self) -> None:
        """Remove fake tensors from the caches, containers and names that forward has filled."""
        for cache, misses in self._caches.values():
            if cache.cache_info().misses != misses:
                cache.cache_clear()
        for source, name in self._added():
            if holds_fakes(vars(source.value)[name]):
                delattr(source.value, name)
        for key, source in self._sources.items():
            now = source.now()
            if now is source.value and key in self._values:
                remove_fakes(now, self._values[key].expected)
            elif now is not source.value and holds_fakes(now):
                source.restore()


def _has_changed(found: OutsideValue) -> bool:
    value = found.holder.get(found.name, MISSING)
    return value is not found.expected if found.itself else not same_value(value, found.expected)


def restore_generators(values: Iterable[OutsideValue]) -> None:
    """Restore the recorded states of the random generators among ``values``."""
    for found in values:
        value, expected = found.holder.get(found.name, MISSING), found.expected
        if isinstance(value, numpy.random.Generator):
            value.bit_generator.state = expected.bit_generator.state
        elif isinstance(value, numpy.random.RandomState):
            value.set_state(expected.get_state())
        elif isinstance(value, random.Random):
            value.setstate(expected.getstate())
