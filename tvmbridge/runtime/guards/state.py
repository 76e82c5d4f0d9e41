"""The live state of a module: its tensors at each call, and checks that it has not changed.

Unless a fast guard accepts the call, parameters are looked up by name in their owners at each call.
Parameters that were replaced, tied, loaded or optimised are therefore always noticed.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tvmbridge.compiler.pack import is_at
from tvmbridge.core.captured_graph import CapturedGraph
from tvmbridge.core.carried import CarriedTensors
from tvmbridge.core.contents import MISSING
from tvmbridge.core.libraries import acts
from tvmbridge.core.number_places import set_number_in
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.core.sharding import class_before
from tvmbridge.core.types import InputKind, NumberKey, attribute_key
from tvmbridge.core.writes import version_of
from tvmbridge.graph_capture.observe.hooks import GLOBAL_HOOKS, HOOKS, traced_hooks
from tvmbridge.graph_capture.trace.left import adds_to, leave, numbers_left
from tvmbridge.graph_capture.trace.old_norms import OldNorms
from tvmbridge.runtime.guards.answers import AnswerGuard, ArgumentAnswers
from tvmbridge.runtime.guards.class_entries import registered_names
from tvmbridge.runtime.guards.entries import PATCHED, REPLACED, entry_of, structure_of
from tvmbridge.runtime.guards.forwards import stands_for
from tvmbridge.runtime.guards.held_numbers import HeldNumbers
from tvmbridge.runtime.guards.kinds import KindGuard
from tvmbridge.runtime.guards.values import ValueGuard
from tvmbridge.runtime.guards.watch import Place

_HELD = ("_parameters", "_buffers", "_modules")
# The keys of a module's ``__dict__`` that belong to its structure.
_STRUCTURE = (*_HELD, *HOOKS, "training", "forward")
_REHOOKED = Reason(Kind.CHANGED, "the hooks of a submodule")


class ModuleState:
    """Finds the tensors that compiled code reads, and detects changes since the capture.

    - ``names``: the dotted names of the module's tensors that are inputs of the code.
    - ``kinds``: compares the tensors' dtypes, shapes and devices.
    - ``carries_over``: whether forward leaves values, such as counts, that the next call reads or
      adds to.
    - ``replaces``: whether forward replaces a value that the next call reads.
    - ``branches``: the conditions on arguments by which forward branches.
    - ``norms``: the weights that old ``weight_norm`` and ``spectral_norm`` hooks compute.
    """

    def __init__(self, module: nn.Module, captured: CapturedGraph) -> None:
        assumed = captured.assumptions
        inputs = [d for d in captured.inputs if d.kind.is_of_module]
        self.names = tuple(d.target or "" for d in inputs)
        self._attributes = {d.target for d in inputs if d.kind is InputKind.ATTRIBUTE}
        self.kinds = KindGuard(inputs)
        based = [o.alias for o in captured.outputs if o.alias is not None]
        beside = [str(a.key) for a in based if a.kind is InputKind.BUFFER]
        self._ties = list(assumed.aliases.items())
        self._answers = AnswerGuard(assumed.answers)
        self.branches = ArgumentAnswers(assumed.answers, captured.convention.in_spec)
        beside += self._answers.names
        self._numbers = HeldNumbers(module, captured.convention.held, assumed.values)
        self._outside = {k: v for k, v in captured.outside.items() if k not in self._numbers}
        self._carried = {
            name: (module.get_submodule(place.key[0]), place.key[1], place.steps)
            for name, place in captured.carried.items()
        }
        self._places = {
            name: entry_of(module, name)
            for name in (*self.names, *beside, *(n for tie in self._ties for n in tie))
            if not self._is_beside(name)
        }
        self._modules = list(module.modules())
        places = [self._places[name] for name in self.names if name in self._places]
        read = {(id(e.owner), e.held, e.key) for e in places}
        # Tensors that forward's first call creates are None now, and are not compared here.
        self._structure = [
            e for e in structure_of(module) if (id(e.owner), e.held, e.key) not in read
        ]
        self._sizes = [
            (m, held, len(m.__dict__[held]))
            for m in self._modules
            for held in _HELD
            if held in m.__dict__
        ]
        # An entry of the __dict__ hides a parameter, buffer or submodule of the same name.
        self._unhidden = [
            (m, [n for n in registered_names(m) if n not in vars(m)]) for m in self._modules
        ]
        self._classes = [(c, c.forward) for c in {type(m) for m in self._modules}]
        self._values = ValueGuard.of(module, assumed.values, assumed.outside)
        self._assigned = [
            (module.get_submodule(path), name, value)
            for (path, name), value in captured.convention.assigned.items()
        ]
        left = captured.convention.left.items()
        self._left = [(module.get_submodule(key[0]), key[1:], way) for key, way in left]
        reached = {*assumed.values, *map(attribute_key, self.names)}
        self.carries_over = any(way.is_added or key in reached for key, way in left)
        placed = {key for key, way in left if way.into == "place" and way.number is None}
        self.replaces = not placed.isdisjoint(reached)
        self.norms = OldNorms.of(module, assumed.normed)
        self._traced_hooks = list(map(traced_hooks, self._modules[1:]))
        self._is_hooked = any(self._traced_hooks)
        constants = {id(t): t for t in (*captured.constant_tensors.values(), *assumed.foreign)}
        self._constants = [(t, _written(t), t.requires_grad) for t in constants.values()]
        self._bind({})

    def _bind(self, memo: Mapping[int, Any]) -> None:
        """Collect the dictionaries that are read at each call.

        ``memo`` is empty, or the memo of :func:`copy.deepcopy`, which has their copies.
        """

        def copied(value: Any) -> Any:
            return memo.get(id(value), value)

        def dict_of(owner: nn.Module, held: str) -> dict[str, Any]:
            # A copy in progress has no attributes yet, but its dictionaries have been copied.
            return copied(owner.__dict__[held]) if held else copied(owner).__dict__

        # Other threads may read while this thread binds: each attribute is assigned once, complete,
        # and ``_in_holders``, which ends the binding for them, comes last.
        found: dict[str, tuple[Any, str]]
        found = {n: (dict_of(e.owner, e.held), e.key) for n, e in self._places.items()}
        # Tensors in lists of the module may have been copied with it.
        outside = {name: copied(tensor) for name, tensor in self._outside.items()}
        found |= {name: (outside, name) for name in outside}
        found |= {n: (self._numbers, n) for n in self.names if n in self._numbers}
        carried = CarriedTensors(
            {n: (dict_of(o, ""), key, steps) for n, (o, key, steps) in self._carried.items()}
        )
        found |= {name: (carried, name) for name in self._carried}
        self._found = found
        places = [found[name] for name in self.names]
        self._slots = [
            (_TensorsOf(owner) if name in self._attributes else owner, key)
            for name, (owner, key) in zip(self.names, places, strict=True)
        ]
        self._entries = [
            (dict_of(e.owner, e.held), e.key, copied(e.expected), e.reason) for e in self._structure
        ]
        self._assignments = [(dict_of(o, ""), n, value) for o, n, value in self._assigned]
        self._dicts = [dict_of(m, held) for m, held, _ in self._sizes]
        self._lengths = [length for _, _, length in self._sizes]
        # Code that iterates over submodules depends on their order.
        several = [m for m in self._modules if len(m._modules) > 1]
        self._families = [dict_of(m, "_modules") for m in several]
        self._orders = [tuple(m._modules) for m in several]
        children = self._modules[1:]
        self._members = [copied(m) for m in self._modules]
        self._types = [type(m) for m in self._modules]
        self._attributes_of = [dict_of(m, "") for m in self._modules]
        self._hideable = [(dict_of(m, ""), names) for m, names in self._unhidden if names]
        hooks = [dict_of(m, name) for m in children for name in HOOKS if name in m.__dict__]
        self._hooks = [*hooks, *(GLOBAL_HOOKS if children else ())]
        self._hookable = [copied(m) for m in children]
        replaceable = [(m, held) for m, held, _ in self._sizes]
        replaceable += [(m, name) for m in children for name in HOOKS if name in m.__dict__]
        self._holders = [dict_of(m, "") for m, _ in replaceable]
        self._holder_keys = [key for _, key in replaceable]
        self._in_holders = [dict_of(*each) for each in replaceable]

    def rebound(self, memo: Mapping[int, Any]) -> ModuleState:
        """Return a state with the same expectations for a deep copy of the module.

        ``memo`` is the memo of :func:`copy.deepcopy`. The dispatcher came into the module's
        ``__dict__`` after everything looked up here, so all of it has been copied already.
        """
        other = copy.copy(self)
        other._numbers = self._numbers.rebound(memo)
        other._bind(memo)
        other.kinds = self.kinds.renewed()
        other._outside = {n: memo.get(id(t), t) for n, t in self._outside.items()}
        other._assigned = [(memo[id(o)], n, value) for o, n, value in self._assigned]
        other._left = [(memo[id(o)], n, way) for o, n, way in self._left]
        other._carried = {n: (memo[id(o)], *rest) for n, (o, *rest) in self._carried.items()}
        other._values = self._values.rebound(memo)
        other._modules = [memo[id(m)] for m in self._modules]
        other._places = {n: replace(e, owner=memo[id(e.owner)]) for n, e in self._places.items()}
        other._structure = [
            replace(e, owner=memo[id(e.owner)], expected=memo.get(id(e.expected), e.expected))
            for e in self._structure
        ]
        # If a constant was written before the copy, the copy must not match the capture either.
        fresh = [
            (memo.get(id(t), t), _is_unwritten(t, signs), requires_grad)
            for t, signs, requires_grad in self._constants
        ]
        other._constants = [(t, _written(t) if same else (-1, -1), g) for t, same, g in fresh]
        other.norms = self.norms.rebound(memo)
        other._unhidden = [(memo[id(m)], names) for m, names in self._unhidden]
        other._sizes = [(memo[id(m)], held, length) for m, held, length in self._sizes]
        return other

    @property
    def module(self) -> nn.Module:
        """Return the dispatched module."""
        return self._modules[0]

    def tensors(self) -> list[torch.Tensor | None]:
        """Return the module's present tensors in the order of :attr:`names`; None if missing."""
        # Some code gives a module another dictionary: ``del sequential[-1]`` renames submodules.
        now = map(dict.get, self._holders, self._holder_keys)
        if not all(map(operator.is_, now, self._in_holders)) and self._is_followed():
            self._bind({})
        return [owner.get(name) for owner, name in self._slots]

    def _is_followed(self) -> bool:
        """Whether each module still has all dictionaries that are read at a call."""
        held = zip(self._holders, self._holder_keys, strict=True)
        return all(isinstance(holder.get(key), dict) for holder, key in held)

    def requires_grad(self) -> bool:
        """Whether a tensor that compiled code reads or has as a constant requires a gradient."""
        tensors = [*self.tensors(), *(t for t, *_ in self._constants)]
        return any(t.requires_grad for t in tensors if t is not None)

    def is_whole(self) -> bool:
        """Whether all tensors exist and the module's structure is unchanged."""
        return all(t is not None for t in self.tensors()) and self._restructured() is None

    def tensor(self, name: str) -> torch.Tensor | None:
        """Return the present tensor of this name; None if it is missing."""
        owner, key = self._found[name]
        return owner.get(key)

    def rebind(self, name: str, tensor: torch.Tensor) -> None:
        """Set the module's tensor of this name to ``tensor``."""
        owner, key = self._found[name]
        owner[key] = tensor

    def assign(self) -> None:
        """Set the attributes to which forward assigns the same constants at each call."""
        for attributes, name, value in self._assignments:
            attributes[name] = value

    def set_numbers(self, copied: nn.Module, numbers: Mapping[int, torch.Tensor]) -> None:
        """Set the attributes of ``copied``, a copy of the module, whose numbers are inputs.

        ``numbers`` are the values, by the position of the input in :attr:`names`.
        """
        for i, value in numbers.items():
            self._numbers.set_in(copied, self.names[i], value)

    def leave(self, values: Iterable[Any]) -> None:
        """Set the attributes in which forward leaves computed ``values``.

        :meth:`changed` has checked that the counters and lists exist to which it adds.
        """
        computed = numbers_left(self.module, self._left)
        remaining = iter(values)
        for owner, names, way in self._left:
            if way.number is not None:
                set_number_in(owner, names, next(computed))
            else:
                leave(owner, names[0], way, next(remaining))

    def watched_dicts(self) -> list[dict[Any, Any]]:
        """Return the dictionaries whose every change matters."""
        own = {id(m.__dict__) for m in self._members}
        places = (place for place, *_ in self._entries if id(place) not in own)
        return [*self._dicts, *self._hooks, *places]

    def watched_places(self) -> list[Place]:
        """Return the entries of the modules' ``__dict__`` that matter, except for watched values.

        Each is a dictionary, a key, and the present object under it.
        """
        own = {id(m.__dict__): m.__dict__ for m in self._members}
        named = [(held, name) for held in own.values() for name in _STRUCTURE]
        named += [place for place in self._found.values() if id(place[0]) in own]
        named += [(place, key) for place, key, *_ in self._entries if id(place) in own]
        named += self._numbers.places()
        named += [(held, name) for held, names in self._hideable for name in names]
        return [(held, name, held.get(name, MISSING)) for held, name in named]

    @property
    def members(self) -> list[nn.Module]:
        """Return the dispatched module and all its submodules."""
        return self._members

    @property
    def classes(self) -> list[tuple[type[nn.Module], Any]]:
        """Return the classes of the modules, each with its forward at the capture."""
        return self._classes

    @property
    def values(self) -> ValueGuard:
        """Return the guard of the values that forward reads."""
        return self._values

    @property
    def is_plain(self) -> bool:
        """Whether no hook computes weights at a call, and forward reads no values of buffers."""
        return not (self.norms or self._answers.names)

    @property
    def constants(self) -> list[torch.Tensor]:
        """Return the tensors that the captured graph has as constants."""
        return [tensor for tensor, *_ in self._constants]

    def replaced(self) -> bool:
        """Whether a submodule was replaced by another since the capture."""
        return any(
            reason is REPLACED and place.get(key) is not expected
            for place, key, expected, reason in self._entries
        )

    def _restructured(self) -> Reason | None:
        for place, key, expected, reason in self._entries:
            if place.get(key, MISSING) is not expected:
                now = place.get(key, MISSING)
                if reason is not PATCHED or stands_for(now) is not stands_for(expected):
                    return reason
        # Lists are compared as a whole, which is fast enough for every call.
        if list(map(len, self._dicts)) != self._lengths:
            return Reason(Kind.COUNT)
        if list(map(tuple, self._families)) != self._orders:
            return Reason(Kind.CHANGED, "the order of submodules")
        if list(map(type, self._members)) != self._types:
            if list(map(class_before, self._members)) != self._types:
                return Reason(Kind.CHANGED, "the class of a submodule")
            self._types = list(map(type, self._members))
        if not all(map(operator.is_, map(vars, self._members), self._attributes_of)):
            return Reason(Kind.CHANGED, "the __dict__ of a submodule")
        if not all(held.keys().isdisjoint(names) for held, names in self._hideable):
            return Reason(Kind.CHANGED, "an attribute that hides a parameter, buffer or submodule")
        for class_, forward in self._classes:
            if class_.forward is not forward:
                return PATCHED
        return self.rehooked() or self.norms.changed()

    def rehooked(self) -> Reason | None:
        """Return why the captured graph does not fit the hooks on submodules; None if it does."""
        if not any(self._hooks):
            return _REHOOKED if self._is_hooked else None
        traced = {id(hook) for hooks in self._traced_hooks for hook, _ in hooks}
        if list(map(traced_hooks, self._hookable)) != self._traced_hooks:
            return _REHOOKED
        hooks = [h for table in self._hooks for h in self.norms.others(table.values())]
        if acts(h for h in hooks if id(h) not in traced):
            return Reason(Kind.HOOKED)
        return None

    def changed(self, tensors: Sequence[torch.Tensor | None], *, check_grad: bool) -> Reason | None:
        """Return why compiled code does not fit the module as it is now; None if it does."""
        reason = self._restructured() or self._unserved_number()
        reason = reason or self.kinds.changed(tensors, check_grad)
        return reason or self._changed_beside(check_grad)

    def changed_beside_flags(self, tensors: Sequence[torch.Tensor | None]) -> Reason | None:
        """Return the same as :meth:`changed`, but ignore ``requires_grad`` of the ``tensors``."""
        # Not kinds.changed: it remembers a comparison that includes requires_grad.
        reason = self._restructured() or self._unserved_number()
        reason = reason or self.kinds.differs(tensors, check_grad=False)
        return reason or self._changed_beside(check_grad=True)

    def _is_beside(self, name: str) -> bool:
        """Whether the input ``name`` is no tensor that a name in the module reaches."""
        return name in self._outside or name in self._numbers or name in self._carried

    def _unserved_number(self) -> Reason | None:
        label = self._numbers.changed()
        if label is None:
            fit = (adds_to(owner, names, way) for owner, names, way in self._left)
            label = None if all(fit) else "a counter or list that forward adds to"
        return Reason(Kind.CHANGED, label) if label else None

    def added_to(self) -> list[tuple[dict[str, Any], str, type]]:
        """Return the numbers and lists that forward changes: dictionary, key and class of each."""
        return [
            (vars(owner), name, list if way.number is None else type(vars(owner).get(name, 0)))
            for owner, (name, *inside), way in self._left
            if not inside and (way.number is not None or way.into != "place")
        ]

    def changed_numbers(self) -> frozenset[NumberKey]:
        """Return the places in modules that have other numbers than at the capture."""
        paths = {id(m): path for path, m in self.module.named_modules()}
        found = self._values.numbers_changed()
        return frozenset((paths[id(o)], *names) for o, names in found if id(o) in paths)

    def _changed_beside(self, check_grad: bool) -> Reason | None:
        """Return a change other than of the structure or of kinds of tensors; None if none."""
        for alias, name in self._ties:
            if self.tensor(alias) is not self.tensor(name):
                return Reason(Kind.UNTIED)
        for constant, signs, requires_grad in self._constants:
            if not _is_unwritten(constant, signs):
                return Reason(Kind.WRITTEN)
            if check_grad and constant.requires_grad is not requires_grad:
                return Reason(
                    Kind.CHANGED, "requires_grad of a tensor that forward has as a constant"
                )
        value = self.value_changed()
        return Reason(Kind.CHANGED, value) if value else None

    def value_changed(self) -> str | None:
        """Return the name of a value that forward reads and that has changed; None if none has."""
        return self._values.changed() or self._answers.changed(self.tensor)

    def outgrown(self) -> bool | None:
        """Return how the module has changed since the code was compiled.

        Returns:
            True if a number or a constant tensor has changed, so that each value needs other code;
            False for another change; None if nothing has changed.
        """
        reason = self.changed(self.tensors(), check_grad=True)
        if reason is None:
            return None
        return reason.kind is Kind.WRITTEN or self._values.is_number_changed()

    def is_otherwise(self) -> bool:
        """Whether a value has changed, or a tensor is of another kind than in the capture."""
        exchanged = self.kinds.differs(self.tensors(), check_grad=False)
        return exchanged is not None or self.value_changed() is not None


class _TensorsOf:
    """Looks up the tensors among the attributes of a module, which may hold anything else."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self._attributes = attributes

    def get(self, name: str) -> torch.Tensor | None:
        value = self._attributes.get(name)
        return value if isinstance(value, torch.Tensor) else None


def _written(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the version and the address of ``tensor``, which change if it is written or moved."""
    return version_of(tensor), tensor.data_ptr()


def _is_unwritten(tensor: torch.Tensor, signs: tuple[int, int]) -> bool:
    """Whether ``tensor`` has the values that it had with these signs of :func:`_written`."""
    version, address = signs
    return version_of(tensor) == version and is_at(tensor, address)
