"""Containers among the arguments (lists, dicts, caches) that forward mutates.

The captured graph would lose such a mutation. While forward is traced the containers are compared
before and after: the final content of each that changed becomes an additional output, and is
written into the caller's own object at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tvmbridge.core.assumptions import Check
from tvmbridge.core.errors import CaptureError
from tvmbridge.core.libraries import UNSEEN
from tvmbridge.core.structure import opened, unflatten
from tvmbridge.core.torch_private import pytree
from tvmbridge.graph_capture.trace.validation import Noted, noted_checks, raise_unless_passed

# Stands, among the results, for an argument that is returned as the object that it is.
_MARK = "tvmbridge.argument."

Arguments = tuple[Sequence[Any], Mapping[str, Any]]


class ArgumentWatch:
    """Wraps a forward so that mutations of containers and checks of values are outputs.

    Where it changes some, it returns ``(results, changed)``: ``changed`` maps the place of each (a
    position or a keyword) to its final content, and where a result is such an argument itself, a
    mark stands for it. ``changed`` holds these places after a call. Where forward checks values it
    returns ``(results, changed, passed)``, and ``checks`` says what is raised where one did not.

    Args:
        forward: the function that is watched.
        checks: whether the checks of values are noted.
    """

    def __init__(self, forward: Callable[..., Any], *, checks: bool = True) -> None:
        self.changed: tuple[Any, ...] = ()
        self.checks: tuple[Check, ...] = ()
        self._forward = forward
        self._noting = noted_checks if checks else _no_checks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        held = dict(_containers(args, kwargs))
        before = {place: pytree.tree_flatten(value) for place, value in held.items()}
        with self._noting() as noted:
            results = self._forward(*args, **kwargs)
        results = opened(results, {id(value) for value in held.values()})
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
    """``results`` with ``marks`` in place of the containers with these ids."""
    leaves, spec = pytree.tree_flatten(results, is_leaf=lambda value: id(value) in marks)
    if not any(id(leaf) in marks for leaf in leaves):
        return results  # a torch.Size in it is none after it was flattened
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
    """The results of a call from its leaves; ``changed`` arguments get their new content.

    Raises:
        Exception: that of one of the ``checks``, the last leaves, which did not pass.
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
    """``target`` with the content of ``content``; ``content`` itself where that cannot be."""
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
    """Whether the content of a container can be replaced, or that of the containers in it."""
    if isinstance(value, torch.Tensor | nn.Module | type):
        return False
    return isinstance(value, list | dict | tuple) or hasattr(value, "__dict__")
