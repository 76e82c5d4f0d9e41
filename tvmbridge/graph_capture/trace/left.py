"""Left: the values that forward leaves on its module at each call: tensors, objects, lists, counts.

``self.magnitude = x.abs()``, ``self.policy = Normal(mean, scale)``, ``self.losses.append(loss)``
and ``self.steps += 1``. While forward is traced, what it leaves becomes one more result, and the
module gets back what it had. A call takes the results apart and leaves them on the user's module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx, nn

from tvmbridge.core.contents import MISSING, all_held, is_constant
from tvmbridge.core.libraries import BOOKKEEPING
from tvmbridge.core.structure import UNKNOWN, with_parts
from tvmbridge.core.types import Left
from tvmbridge.graph_capture.trace.left_numbers import Count, Grown, PassedOn
from tvmbridge.graph_capture.trace.old_norms import normed_weights
from tvmbridge.graph_capture.trace.patches import patched_here

Key = tuple[str, str]
_OF_MODULES = frozenset(vars(nn.Module())) | {"forward"}


class LeftWatch:
    """Wraps a forward so that it returns ``(results, left)``, where it leaves something.

    After a call ``ways`` says for each attribute how its value is left. What cannot be left by
    compiled code stays on the module, where who observes forward finds it.

    Args:
        forward: of ``module``.
        module: whose attributes are looked at.
        names: of the attributes, as (submodule's name, attribute's name).
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
        known = {id(v) for v in _objects_of(self._module, (args, kwargs))}
        watched = {key: _watched(value) for key, value in before.items()}
        for key, value in watched.items():
            if value is not before[key]:
                self._owners[key].__dict__[key[1]] = value
        results = None
        try:
            with PassedOn():
                results = self._forward(*args, **kwargs)
        finally:
            left = [*self._left(before, watched, known)]
        return (results, tuple(left)) if self.ways else results

    def _left(
        self, before: Mapping[Key, Any], watched: Mapping[Key, Any], known: set[int]
    ) -> Iterator[Any]:
        """What each attribute is left with, of those that could be; they get back what they had."""
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
            if way.count is None:
                yield value


class LeftFinder:
    """As :class:`LeftWatch`, of a forward of which nothing is known yet.

    What it leaves in lists that are there, it has left at their ``"end"``: the lists get back what
    they held. Counts are not found, since they would stand for each number that forward reads.
    """

    def __init__(self, forward: Callable[..., Any], module: nn.Module) -> None:
        self.ways: dict[Key, Left] = {}
        self._forward = forward
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.ways = {}
        known = {id(v) for v in _objects_of(self._module, (args, kwargs))}
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
                if f"{path}.{name}" in normed:  # its hook's own function makes it again
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
    """What forward has left under a name; UNKNOWN: nothing, or no object that it has made."""
    if now is before or is_constant(now) or name in BOOKKEEPING or name in _OF_MODULES:
        return UNKNOWN
    return with_parts(now, known)


def assigned(genuine: Callable[..., None], owner: nn.Module, name: str, value: Any) -> None:
    """``__setattr__`` of modules, which takes what is data-dependent without looking at it."""
    if issubclass(type(value), fx.Proxy):
        object.__setattr__(owner, name, value)
    else:
        genuine(owner, name, value)


def data_dependent_assigned() -> AbstractContextManager[Any]:
    """Within it attributes of modules may be data-dependent."""
    return patched_here(nn.Module, "__setattr__", assigned)


def _watched(value: Any) -> Any:
    """What stands for a value while forward runs, and notes whether it is read."""
    if type(value) is int:
        return Count(value)
    return Grown(value) if type(value) is list else value


def _way(now: Any, watched: Any, before: Any, known: set[int]) -> tuple[Left | None, Any]:
    """How a value is left, and what of it is; None: it cannot be."""
    if type(now) is Count:
        counts = type(watched) is Count and now.origin is watched and not watched.is_read
        return (Left(count=now.step), None) if counts else (None, None)
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


def _objects_of(module: nn.Module, arguments: Any) -> Iterator[Any]:
    """The objects that are there before forward runs, beside tensors."""
    held = [all_held(v) for m in module.modules() for v in (m, *m.__dict__.values())]
    for value in [each for values in (*held, all_held(arguments)) for each in values]:
        if not isinstance(value, torch.Tensor | fx.Proxy):
            yield value


def leave(owner: nn.Module, name: str, way: Left, values: Iterator[Any]) -> None:
    """Leave on ``owner`` what a call leaves; ``values`` has that of all attributes, in order."""
    if way.count is not None:
        owner.__dict__[name] = getattr(owner, name) + way.count
        return
    value = next(values)
    if way.into == "end":
        owner.__dict__[name].extend(value)
    elif way.into == "content":
        owner.__dict__[name][:] = value
    else:
        owner.__dict__[name] = value
