"""Signatures: what a call's arguments must be for the code that was compiled for others."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from tvmbridge.core.contents import same_value
from tvmbridge.core.generated import plain_text
from tvmbridge.core.torch_private import has_storage, pytree
from tvmbridge.graph_capture.observe.plain import PLAIN, UNSEEN, is_unseen
from tvmbridge.graph_capture.trace.arguments import Arguments
from tvmbridge.runtime.guards.spelling import (
    NOT_TAKEN,
    STRUCTURE,
    Mismatch,
    Parameters,
    Spelling,
    other_constant,
    shown,
)

# Of more spellings than that each call is bound anew, and no fast guard knows them.
_MOST_SPELLINGS = 4
_TEXT = {str}

_PLACED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

OTHER_SHAPE = "the shape of an input differs"


class Matched(NamedTuple):
    """A call that fits a signature: its leaves, and its arguments as the sample spells them."""

    leaves: list[Any]
    arguments: Arguments


class Signature:
    """Structure, shapes, dtypes, devices and constants of the arguments of a call.

    Args:
        args: the positional arguments.
        kwargs: the keyword arguments.
        forward: what is called with them. Keywords that it has no parameters of its own for are
            seen by it in their order.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        forward: Callable[..., Any] | None = None,
    ) -> None:
        leaves, self.spec = pytree.tree_flatten((args, dict(kwargs)))
        self.keywords = tuple(kwargs)
        unnamed = _unnamed(forward, kwargs) if forward is not None else ()
        self.ordered = unnamed if len(kwargs) > 1 else ()
        # Forward sees the objects that are their names: only plain ones are as the sample's.
        self.sees_names = bool(unnamed)
        self.num_args = len(args)
        # Arguments that are leaves themselves need no flattening at a call.
        arguments = [*args, *kwargs.values()]
        self.flat = len(leaves) == len(arguments) and all(map(operator.is_, leaves, arguments))
        self.forward = forward
        self.parameters = Parameters.of(forward)
        self._spellings: dict[tuple[int, tuple[str, ...]], Spelling | Mismatch] = {}
        self.names = _names(args, kwargs, forward)
        places = [*range(len(args)), *kwargs] if self.flat else []
        ignored = _unread(self.parameters, len(args), self.keywords)
        # Forward does not read them: calls are served, and compiled for, with the sample's.
        self._unread = {
            i: leaves[i]
            for i, place in enumerate(places)
            if place in ignored and not isinstance(leaves[i], torch.Tensor)
        }
        self.tensors = [
            (i, leaf.shape, leaf.dtype, leaf.device)
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
        ]
        self.constants = [
            (i, leaf)
            for i, leaf in enumerate(leaves)
            if not isinstance(leaf, torch.Tensor) and i not in self._unread
        ]

    @property
    def is_taken(self) -> bool:
        """Whether forward takes such arguments, as far as its parameters say."""
        known = self.parameters
        return known is None or known.bound(self.num_args, self.keywords) is not None

    def untaken(self) -> Mismatch | None:
        """Why nothing can be compiled for such arguments, if that shows without a trace."""
        if not self.is_taken:
            return NOT_TAKEN
        unseen = next(((i, leaf) for i, leaf in self.constants if is_unseen(leaf)), None)
        return None if unseen is None else self._of(unseen[0], UNSEEN, shown(unseen[1]))

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """The leaves of a call in the spelling and order of the signature; None: another one."""
        if len(args) != self.num_args or kwargs.keys() != set(self.keywords):
            return None
        if self.sees_names and not has_plain_names(kwargs):
            return None
        if self.ordered and tuple(k for k in kwargs if k in self.ordered) != self.ordered:
            return None
        if self.flat:
            return [*args, *(kwargs[k] for k in self.keywords)]
        leaves, spec = pytree.tree_flatten((args, {k: kwargs[k] for k in self.keywords}))
        return leaves if spec == self.spec else None

    def match(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, any_size: bool = False
    ) -> Matched | Mismatch:
        """The leaves and arguments of a call that fits the signature, or why it does not.

        With ``any_size`` shapes may be others.
        """
        if self.parameters is not None and self.parameters.changed():
            return Mismatch("the code or a default of forward changed")
        call: Arguments = args, kwargs
        leaves = self.flatten(args, kwargs)
        spelling: Spelling | None = None
        if leaves is None:
            found = self._spelling(args, kwargs)
            if isinstance(found, Mismatch):
                return found
            spelling = found
            args, kwargs = spelling.respelled(call)
            leaves = self.flatten(args, kwargs)
            if leaves is None:
                return Mismatch(STRUCTURE, "a list, tuple or dict among them holds something else")
        if self._unread:
            leaves = [self._unread.get(i, leaf) for i, leaf in enumerate(leaves)]
            args = tuple(leaves[: self.num_args])
            kwargs = dict(zip(self.keywords, leaves[self.num_args :], strict=True))
        wrong = self.mismatch(leaves, any_size) or (spelling and spelling.mismatch(call))
        return wrong or Matched(leaves, (args, kwargs))

    def _spelling(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Spelling | Mismatch:
        key = len(args), tuple(kwargs)
        known = self._spellings.get(key)
        if known is not None:
            return known
        if self.parameters is None:
            return Mismatch(STRUCTURE, self._other_structure(args, kwargs))
        made = self.parameters.spelling((self.num_args, self.keywords), key)
        if len(self._spellings) < _MOST_SPELLINGS:
            self._spellings[key] = made
        return made

    def _other_structure(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        more = [f"`{k}` is given" for k in kwargs if k not in self.keywords]
        more += [f"`{k}` is not given" for k in self.keywords if k not in kwargs]
        if len(args) != self.num_args:
            more.append(f"{len(args)} positional arguments, compiled for {self.num_args}")
        return ", ".join(more[:4])

    def spellings(self) -> list[tuple[int, tuple[str, ...], Spelling]]:
        """Those of calls that have come, beside the sample's: so many arguments, these keywords."""
        known = list(self._spellings.items())
        return [(*key, each) for key, each in known if isinstance(each, Spelling)]

    def mismatch(self, leaves: Sequence[Any], any_size: bool = False) -> Mismatch | None:
        """Why ``leaves`` do not fit the signature; None when they do."""
        for i, shape, dtype, device in self.tensors:
            leaf = leaves[i]
            if type(leaf) not in PLAIN:
                expected = f"compiled for a tensor {tuple(shape)}"
                return self._of(
                    i, "an argument is not a plain tensor", f"{shown(leaf)}, {expected}"
                )
            if leaf.layout is not torch.strided or leaf.is_nested or leaf._is_zerotensor():
                return self._of(i, "the layout of an input differs", f"layout {leaf.layout}")
            if not has_storage(leaf):
                return Mismatch("an argument has left a function transform")
            if leaf.shape != shape and not any_size:
                text = f"shape {tuple(leaf.shape)}, compiled for {tuple(shape)}"
                return self._of(i, OTHER_SHAPE, text)
            if leaf.dtype is not dtype:
                text = f"dtype {leaf.dtype}, compiled for {dtype}"
                return self._of(i, "the dtype of an input differs", text)
            if leaf.device != device:
                text = f"device {leaf.device}, compiled for {device}"
                return self._of(i, "the device of an input differs", text)
        for i, value in self.constants:
            leaf = leaves[i]
            if leaf is not value and not same_value(leaf, value):
                return other_constant(self.names[i], leaf, value)
        return None

    def _of(self, number: int, reason: str, text: str) -> Mismatch:
        return Mismatch(reason, f"argument `{self.names[number]}`: {text}")

    def __str__(self) -> str:
        shapes = ", ".join(
            f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"
            for _, shape, dtype, _ in self.tensors
        )
        return f"({shapes})"


def has_plain_names(kwargs: Mapping[str, Any]) -> bool:
    """Whether all keywords are exactly of the class ``str``, and none of a subclass of it."""
    return _TEXT.issuperset(map(type, kwargs))


def with_plain_names(
    kwargs: Mapping[str, Any], forward: Callable[..., Any]
) -> dict[str, Any] | None:
    """``kwargs`` with plain names; None where ``forward`` could see that the names were others."""
    if _unnamed(forward, [k for k in kwargs if type(k) is not str]):
        return None
    return {plain_text(name): value for name, value in kwargs.items()}


def nearest(mismatches: Sequence[Mismatch]) -> Mismatch | None:
    """The one to be told of several signatures': where arguments are of the same structure."""
    alike = (m for m in mismatches if m.reason != STRUCTURE)
    return next(alike, mismatches[-1] if mismatches else None)


def _names(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], forward: Callable[..., Any] | None
) -> list[str]:
    """The leaves of the arguments by what messages call them."""
    placed = dict(enumerate(_placed(forward)))
    named = [*((placed.get(i, str(i)), value) for i, value in enumerate(args)), *kwargs.items()]
    return [f"{name}{path}" for name, value in named for path in _paths(value)]


def _paths(value: Any) -> list[str]:
    """Where each leaf of an argument stands in it."""
    try:
        return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(value)[0]]
    except ValueError:  # a registered class need not say
        return [f", leaf {i}" for i, _ in enumerate(pytree.tree_leaves(value))]


def _unread(parameters: Parameters | None, count: int, keywords: tuple[str, ...]) -> set[int | str]:
    """The arguments, by position or keyword, that forward does not read."""
    bound = parameters.bound(count, keywords) if parameters is not None else None
    if parameters is None or bound is None:
        return set()
    return {place for parameter, place in bound.items() if parameters.is_unread(parameter)}


def _placed(forward: Callable[..., Any] | None) -> list[str]:
    """The names of what may be given by position; a wrapper has those of what it wraps."""
    with suppress(TypeError, ValueError):
        parameters = inspect.signature(forward).parameters if forward is not None else {}
        return [name for name, p in parameters.items() if p.kind in _PLACED]
    return []


def _unnamed(forward: Callable[..., Any], kwargs: Iterable[str]) -> tuple[str, ...]:
    """The keywords that ``forward`` takes without a parameter of that name, in their order."""
    try:
        named = inspect.signature(forward).parameters
    except (TypeError, ValueError):
        return tuple(kwargs)
    return tuple(k for k in kwargs if k not in named)
