"""Containers among the arguments (lists, dicts, caches) that forward mutates.

The captured graph would lose such a mutation. During a trace, containers are compared before and
after forward. The final content of each changed container becomes an additional output, which each
call writes into the caller's own object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tvmbridge.calls.validation import Noted, noted_checks, raise_unless_passed
from tvmbridge.core.assumptions import Check
from tvmbridge.core.errors import CaptureError
from tvmbridge.core.libraries import UNSEEN
from tvmbridge.core.structure import children, opened, unflatten
from tvmbridge.core.torch_private import pytree

# The prefix of strings that, among the results, stand for arguments which forward returns.
_MARK = "tvmbridge.argument."

Arguments = tuple[Sequence[Any], Mapping[str, Any]]


class ArgumentWatch:
    """Wraps a forward so that mutations of containers and checks of values become outputs.

    A call returns ``results`` alone if forward mutates no container and checks no value. Otherwise
    it returns ``(results, changed)``, or ``(results, changed, passed)`` if forward checks values:

    - ``results``: what forward returns; a string stands for a mutated argument in it
    - ``changed``: maps a position or keyword to the final content of the mutated container
    - ``passed``: a boolean tensor for each check

    After a call, the attribute ``changed`` has the positions and keywords of mutated containers.
    The attribute ``checks`` has the error that each check raises if it fails.

    Args:
        older: objects that exist before forward runs; results that hold one are not opened.
    """

    def __init__(
        self, forward: Callable[..., Any], *, checks: bool = True, older: Sequence[Any] = ()
    ) -> None:
        self._older = older
        self.changed: tuple[Any, ...] = ()
        self.checks: tuple[Check, ...] = ()
        self._forward = forward
        self._noting = noted_checks if checks else _no_checks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        held = dict(_containers(args, kwargs))
        before = {place: pytree.tree_flatten(value) for place, value in held.items()}
        with self._noting() as noted:
            results = self._forward(*args, **kwargs)
        older = {id(value) for value in self._older}
        results = opened(results, {id(value) for value in held.values()}, older)
        self.checks = tuple(check for _, check in noted)
        changed = {p: v for p, v in held.items() if _differ(before[p], pytree.tree_flatten(v))}
        self.changed = tuple(changed)
        for place, value in changed.items():
            if not is_writable(value):
                raise CaptureError(
                    f"forward changes its argument {place!r}, a {type(value).__name__} whose "
                    "content cannot be replaced"
                )
        if not changed and not noted:
            return results
        marks = {id(value): f"{_MARK}{place}" for place, value in changed.items()}
        return (_marked(results, marks), changed, *([tuple(p for p, _ in noted)] if noted else []))


def _marked(results: Any, marks: Mapping[int, str]) -> Any:
    """Return ``results`` with the strings ``marks`` in place of the containers with these ids."""
    leaves, spec = pytree.tree_flatten(results, is_leaf=lambda value: id(value) in marks)
    if not any(id(leaf) in marks for leaf in leaves):
        return results  # flattening and unflattening would turn a torch.Size into a tuple
    return pytree.tree_unflatten([marks.get(id(leaf), leaf) for leaf in leaves], spec)


@contextmanager
def _no_checks() -> Iterator[Noted]:
    yield []


def _containers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    for place, value in [*enumerate(args), *kwargs.items()]:
        if not pytree.tree_is_leaf(value):
            yield place, value


def _differ(before: tuple[list[Any], Any], after: tuple[list[Any], Any]) -> bool:
    same = before[1] == after[1] and all(a is b for a, b in zip(before[0], after[0], strict=True))
    return not same


def rebuild(
    flat: list[Any],
    out_spec: pytree.TreeSpec,
    changed: Sequence[Any],
    arguments: Arguments,
    checks: Sequence[Check] = (),
) -> Any:
    """Return the results of a call from its leaves, and update the containers that it changed.

    Args:
        flat: the leaves that the compiled code returns; the last ones are results of ``checks``.
        changed: the positions and keywords of the containers that forward mutates.

    Raises:
        Exception: a check did not pass; the error is the one that the check names.
    """
    if checks:
        raise_unless_passed(flat[-len(checks) :], checks)
    if not changed and not checks:
        return unflatten(flat, out_spec)
    args, kwargs = arguments
    held = {place: args[place] if isinstance(place, int) else kwargs[place] for place in changed}
    marks = {f"{_MARK}{place}": value for place, value in held.items()}
    flat = [marks.get(leaf, leaf) if isinstance(leaf, str) else leaf for leaf in flat]
    results, contents, *_ = unflatten(flat, out_spec)
    for place, value in held.items():
        _put(contents[place], value)
    return results


def _put(content: Any, target: Any) -> Any:
    """Give ``target`` the content of ``content`` in place, as far as its type allows it.

    Return the object that belongs in the place of ``target``: ``target`` itself if it could be
    changed in place, otherwise ``content``.
    """
    if content is UNSEEN:
        return target
    if type(target) is not type(content) or not is_writable(target) or content is target:
        return content
    if isinstance(target, tuple):
        for new, old in zip(content, target, strict=False):
            _put(new, old)
        return content
    if isinstance(target, list):
        kept = [_put(new, old) for new, old in zip(content, target, strict=False)]
        target[:] = [*kept, *content[len(kept) :]]
        return target
    attributes = target if isinstance(target, dict) else target.__dict__
    found = content if isinstance(content, dict) else content.__dict__
    merged = {k: _put(v, attributes[k]) if k in attributes else v for k, v in found.items()}
    attributes.clear()
    attributes.update(merged)
    return target


def is_writable(value: Any) -> bool:
    """Whether the content of a container, or of containers in it, can be replaced in place."""
    if isinstance(value, torch.Tensor | nn.Module | type):
        return False
    return isinstance(value, list | dict | tuple) or hasattr(value, "__dict__")


def places_in(structure: pytree.TreeSpec) -> list[str]:
    """Return the places of the leaves of a call's arguments: ``.[1][0]``, ``.['mask'][0]``.

    The name of no tensor of a module begins with a point.
    """
    positional, named = children(structure)
    keys = [*range(len(children(positional))), *named.context]
    held = zip(keys, (*children(positional), *children(named)), strict=True)
    return [f".[{key!r}][{number}]" for key, each in held for number in range(each.num_leaves)]


def places_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of a call's arguments by place."""
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    return dict(zip(places_in(structure), leaves, strict=True))
