"""Values that forward leaves behind in attributes of its module at each call.

Examples are ``self.magnitude = x.abs()``, ``self.policy = Normal(mean, scale)``,
``self.losses.append(loss)`` and ``self.steps += 1``. During a trace, the values become an
additional result of forward, and the module gets its old attributes back. A call of the compiled
module takes the values from the results and writes them to the user's module.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from tvmbridge.calls.patches import patched_here
from tvmbridge.core.contents import MISSING, all_held, is_constant
from tvmbridge.core.libraries import BOOKKEEPING
from tvmbridge.core.number_places import number_in
from tvmbridge.core.structure import UNKNOWN, with_parts
from tvmbridge.core.types import Left, NumberKey
from tvmbridge.graph_capture.trace.left_numbers import Count, Grown, PassedOn, used
from tvmbridge.graph_capture.trace.old_norms import normed_weights

Key = tuple[str, str]
_OF_MODULES = frozenset(vars(nn.Module())) | {"forward"}


class LeftWatch:
    """Wraps a forward so that it also returns the values that it leaves behind in attributes.

    A call returns ``(results, left)``, or ``results`` alone if forward leaves no value behind.
    After a call, ``ways`` maps each attribute to how it gets its value: by an assignment, by
    additions to a list, or by an addition to a number. A value that compiled code cannot give to an
    attribute stays on the module, where the observation of forward finds it.

    Args:
        forward: the forward of ``module``.
        module: the module whose attributes are watched.
        names: the attributes, as (submodule's name, attribute's name).
    """

    def __init__(
        self, forward: Callable[..., Any], module: nn.Module, names: Sequence[Key]
    ) -> None:
        self.ways: dict[Key, Left] = {}
        self._forward = forward
        self._owners = {key: module.get_submodule(key[0]) for key in names}
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.ways = {}
        before = {key: owner.__dict__.get(key[1], MISSING) for key, owner in self._owners.items()}
        known = {id(v) for v in objects_of(self._module, (args, kwargs))}
        watched = {key: _watched(value) for key, value in before.items()}
        for key, value in watched.items():
            if value is not before[key]:
                self._owners[key].__dict__[key[1]] = value
        results = None
        try:
            with PassedOn():
                results = used(self._forward(*args, **kwargs))
        finally:
            left = [*self._left(before, watched, known)]
        return (results, tuple(left)) if self.ways else results

    def _left(
        self, before: Mapping[Key, Any], watched: Mapping[Key, Any], known: set[int]
    ) -> Iterator[Any]:
        """Yield the value left behind in each attribute, and restore the attribute's old value.

        Attributes to which compiled code cannot give their value are skipped. Counts are noted in
        ``ways``, and nothing is yielded for them.
        """
        for key, owner in self._owners.items():
            held, name = owner.__dict__, key[1]
            now = held.get(name, MISSING)
            way, value = _way(now, watched[key], before[key], known)
            if way is None:
                if type(now) in (Count, Grown):
                    held[name] = now.plain()
                continue
            self.ways[key] = way
            if before[key] is MISSING:
                held.pop(name, None)
            else:
                held[name] = before[key]
            if way.number is None:
                yield value


class LeftFinder:
    """Wraps a forward as :class:`LeftWatch` does, and finds the attributes itself.

    Every change of an existing list counts as an addition at its ``"end"``, and the list gets its
    old items back. Counts are not found, because finding them would need a stand-in for each number
    that forward reads.
    """

    def __init__(self, forward: Callable[..., Any], module: nn.Module) -> None:
        self.ways: dict[Key, Left] = {}
        self._forward = forward
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.ways = {}
        known = {id(v) for v in objects_of(self._module, (args, kwargs))}
        before = [(p, m.__dict__, dict(m.__dict__)) for p, m in self._module.named_modules()]
        lists = [
            (path, name, value, list(value))
            for path, _, held in before
            for name, value in held.items()
            if type(value) is list
        ]
        left: list[Any] = []
        results = self._forward(*args, **kwargs)
        normed = normed_weights(self._module)
        for path, held, earlier in before:
            for name, now in list(held.items()):
                if f"{path}.{name}" in normed:  # its hook computes it again after each call
                    continue
                value = _found(name, now, earlier.get(name, MISSING), known)
                if value is UNKNOWN:
                    continue
                self.ways[path, name] = Left()
                left.append(value)
                held.pop(name) if name not in earlier else held.update({name: earlier[name]})
        for path, name, value, items in lists:
            if len(value) != len(items) or any(
                a is not b for a, b in zip(value, items, strict=True)
            ):
                self.ways[path, name] = Left(into="end")
                value[:] = items
        return (results, tuple(left)) if self.ways else results


def _found(name: str, now: Any, before: Any, known: set[int]) -> Any:
    """Return the value that forward left behind in an attribute, with plain objects taken apart.

    Return UNKNOWN if forward left no value behind, or did not create all objects in the value.
    """
    if now is before or is_constant(now) or name in BOOKKEEPING or name in _OF_MODULES:
        return UNKNOWN
    return with_parts(now, known)


def assigned(genuine: Callable[..., None], owner: nn.Module, name: str, value: Any) -> None:
    """Set an attribute of a module, also to a data-dependent value; replaces ``__setattr__``."""
    if issubclass(type(value), fx.Proxy):
        object.__setattr__(owner, name, value)
    else:
        genuine(owner, name, value)


def data_dependent_assigned() -> AbstractContextManager[Any]:
    """Return a context in which modules accept data-dependent values as attributes."""
    return patched_here(nn.Module, "__setattr__", assigned)


def _watched(value: Any) -> Any:
    """Return a stand-in that records reads of an integer or a list; any other value as it is."""
    if type(value) is int:
        return Count(value)
    return Grown(value) if type(value) is list else value


def _way(now: Any, watched: Any, before: Any, known: set[int]) -> tuple[Left | None, Any]:
    """Return how an attribute gets its new value, and the value that compiled code must return.

    The first is None if the attribute did not change, or if compiled code cannot give it the value.

    Args:
        watched: the value or stand-in that the attribute had during forward.
        known: the ids of objects that forward did not create.
    """
    if type(now) is Count:
        counts = type(watched) is Count and now.origin is watched and not watched.is_read
        return (Left(number=partial(operator.add, now.step)), None) if counts else (None, None)
    if type(now) is Grown:
        if now is not watched or now.is_read:
            return None, None
        value = with_parts(now.added(), known)
        way = Left(into="content" if now.is_cleared else "end")
        return (None, None) if value is UNKNOWN else (way, value)
    if now is MISSING or now is before or is_constant(now):
        return None, None
    value = with_parts(now, known)
    return (None, None) if value is UNKNOWN else (Left(), value)


def objects_of(module: nn.Module, arguments: Any) -> Iterator[Any]:
    """Yield the objects other than tensors that exist before forward runs."""
    own = (value for m in module.modules() for value in (m, *m.__dict__.values()))
    for value in all_held(*own, arguments):
        if not isinstance(value, torch.Tensor | fx.Proxy):
            yield value


def adds_to(owner: nn.Module, names: NumberKey, way: Left) -> bool:
    """Whether a place of ``owner`` has what ``way`` adds to, a number or a list.

    Forward may create both in its first call, or anew after the script has deleted them.
    """
    if way.number is not None:
        return type(_at(owner, names)) in (int, float)
    return way.into == "place" or type(owner.__dict__.get(names[0])) is list


def numbers_left(
    module: nn.Module, left: Iterable[tuple[nn.Module, NumberKey, Left]]
) -> Iterator[float]:
    """Return an iterator over the numbers that a call leaves behind, computed before any is set."""
    numbers = []
    for owner, names, way in left:
        if way.number is not None:
            source, place = owner, names
            if way.of is not None:
                source, place = module.get_submodule(way.of[0]), way.of[1:]
            numbers.append(way.number(_at(source, place)))
    return iter(numbers)


def _at(owner: nn.Module, names: NumberKey) -> Any:
    """Return what a place of ``owner`` holds, also an attribute of its class; or MISSING."""
    if len(names) > 1:
        return number_in(owner, names)
    return getattr(owner, names[0], MISSING)


def leave(owner: nn.Module, name: str, way: Left, value: Any) -> None:
    """Give the attribute ``name`` of ``owner`` the value that a call leaves behind in it."""
    if way.into == "end":
        owner.__dict__[name].extend(value)
    elif way.into == "content":
        owner.__dict__[name][:] = value
    else:
        owner.__dict__[name] = value
