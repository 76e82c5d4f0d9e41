"""Signatures: the conditions on a call's arguments under which compiled code may serve it."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from tvmbridge.calls.arguments import Arguments
from tvmbridge.calls.plain import PLAIN, has_no_shape, is_unseen
from tvmbridge.core.contents import same_value
from tvmbridge.core.generated import plain_text
from tvmbridge.core.number_inputs import NumberRange, as_tensor, is_number, marked
from tvmbridge.core.reasons import Kind, Reason
from tvmbridge.core.structure import same_structure, unflatten
from tvmbridge.core.torch_private import has_storage, pytree
from tvmbridge.runtime.guards.spelling import NOT_TAKEN, Parameters, Spelling, other_constant, shown

# The most call forms of a signature that are kept. Calls in further forms are bound to forward's
# parameters each time, and no fast guard accepts them.
_MOST_SPELLINGS = 4
_TEXT = {str}

_PLACED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Matched(NamedTuple):
    """A call that fits a signature: its leaves, and its arguments in the sample's call form."""

    leaves: list[Any]
    arguments: Arguments


class Signature:
    """The structure, shapes, dtypes, devices and constants of a sample call's arguments.

    The sample's call form is its number of positional arguments and its keywords in order. A
    constant is an argument that is not a tensor.

    Args:
        forward: the function that is called; None: not known. If it takes keywords by
            ``**kwargs``, their order matters, since forward can see it.
        numbers: by the position of a leaf, the values of a Python number that is an input of the
            code; the leaves of a call have a tensor in its place. None: there are none.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        forward: Callable[..., Any] | None = None,
        numbers: dict[int, NumberRange] | None = None,
    ) -> None:
        self.numbers = numbers or {}
        leaves, self.spec = pytree.tree_flatten((args, dict(kwargs)))
        self.keywords = tuple(kwargs)
        unnamed = _unnamed(forward, kwargs) if forward is not None else ()
        self.ordered = unnamed if len(kwargs) > 1 else ()
        # With **kwargs forward sees the names, and a subclass of str may behave differently.
        self.sees_names = bool(unnamed)
        self.num_args = len(args)
        # Whether each argument is a leaf, so that calls need no flattening.
        arguments = [*args, *kwargs.values()]
        self.flat = len(leaves) == len(arguments) and all(map(operator.is_, leaves, arguments))
        self.forward = forward
        self.parameters = Parameters.of(forward)
        self._spellings: dict[tuple[int, tuple[str, ...]], Spelling | Reason] = {}
        self.names = _names(args, kwargs, forward)
        places = [*range(len(args)), *kwargs] if self.flat else []
        ignored = _unread(self.parameters, len(args), self.keywords)
        # Constants that forward does not read: the sample's values replace any others.
        self._unread = {
            i: leaves[i]
            for i, place in enumerate(places)
            if place in ignored and not isinstance(leaves[i], torch.Tensor)
        }
        self.tensors = [
            (i, _shape_of(leaf), leaf.dtype, leaf.device)
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
        ]
        self.constants = [
            (i, leaf)
            for i, leaf in enumerate(leaves)
            if not (isinstance(leaf, torch.Tensor) or i in self._unread or i in self.numbers)
        ]

    @property
    def is_taken(self) -> bool:
        """Whether the parameters of forward accept the sample's call form."""
        known = self.parameters
        return known is None or known.bound(self.num_args, self.keywords) is not None

    def untaken(self) -> Reason | None:
        """Return why no graph can have the sample's arguments, if it shows without a trace."""
        if not self.is_taken:
            return NOT_TAKEN
        for i, leaf in self.constants:
            if isinstance(leaf, np.ndarray):
                return self._of(i, Kind.ARRAY, shown(leaf))
            if is_unseen(leaf):
                return self._of(i, Kind.UNSEEN, shown(leaf))
        return None

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """Return the leaves of a call in the sample's call form, as the code reads them.

        None: the call's form is another, or a number is none that the code serves.
        """
        leaves = self.leaves_of(args, kwargs)
        return leaves if leaves is None or not self.numbers else self.with_numbers(leaves)

    def with_numbers(self, leaves: Sequence[Any]) -> list[Any] | None:
        """Return ``leaves`` with tensors for numbers; None if the code does not serve a number."""
        found = list(leaves)
        for i, known in self.numbers.items():
            if not known.holds(found[i]):
                return None
            found[i] = as_tensor(found[i])
        return found

    def marked(self, arguments: Arguments) -> Arguments:
        """Return arguments in the sample's call form, with the numbers marked as inputs."""
        if not self.numbers:
            return arguments
        leaves, spec = pytree.tree_flatten((tuple(arguments[0]), dict(arguments[1])))
        found: Arguments = unflatten(marked(leaves, self.numbers), spec)
        return found

    def leaves_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """Return the leaves of a call in the sample's call form; None if its form is another."""
        if len(args) != self.num_args or kwargs.keys() != set(self.keywords):
            return None
        if self.sees_names and not has_plain_names(kwargs):
            return None
        if self.ordered and tuple(k for k in kwargs if k in self.ordered) != self.ordered:
            return None
        if self.flat:
            return [*args, *(kwargs[k] for k in self.keywords)]
        leaves, spec = pytree.tree_flatten((args, {k: kwargs[k] for k in self.keywords}))
        return leaves if same_structure(spec, self.spec) else None

    def match(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, any_size: bool = False
    ) -> Matched | Reason:
        """Return the leaves and arguments of a call that fits the signature, or why it does not.

        With ``any_size``, shapes may differ from the sample's.
        """
        found = self._in_form(args, kwargs)
        if isinstance(found, Reason):
            return found
        leaves, arguments, spelling = found
        wrong = self.mismatch(leaves, any_size) or (spelling and spelling.mismatch((args, kwargs)))
        if wrong:
            return wrong
        return Matched(self.with_numbers(leaves) or [] if self.numbers else leaves, arguments)

    def changed_numbers(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[frozenset[int], Arguments] | None:
        """Return the numbers in which a call differs from the sample, and the call's arguments.

        The numbers are positions of leaves, in the sample's call form, of which the signature has
        one value or none that fits. Return None if the call differs in more than numbers and sizes,
        or in no number.
        """
        found = self._in_form(args, kwargs)
        if isinstance(found, Reason):
            return None
        leaves, arguments, spelling = found
        changed = {
            i
            for i, value in self.constants
            if is_number(leaves[i]) and is_number(value) and not same_value(leaves[i], value)
        }
        changed |= {
            i
            for i, served in self.numbers.items()
            if type(leaves[i]) is not served.kind
            or (served.admits(leaves[i]) and not served.holds(leaves[i]))
        }
        if not changed or not all(is_number(leaves[i]) for i in changed):
            return None
        if self.mismatch(leaves, True, changed) or (spelling and spelling.mismatch((args, kwargs))):
            return None
        return frozenset(changed | self.numbers.keys()), arguments

    def lacks_value(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call differs, but for sizes, in the value of a number alone.

        The code takes this number as an input, and no such code serves the value.
        """
        found = self._in_form(args, kwargs) if self.numbers else Reason(Kind.NUMBER)
        if isinstance(found, Reason):
            return False
        leaves, _, spelling = found
        served = self.numbers.items()
        if not all(type(leaves[i]) is known.kind for i, known in served):
            return False
        if all(known.admits(leaves[i]) for i, known in served):
            return False
        other = self.mismatch(leaves, True, self.numbers)
        return not (other or (spelling and spelling.mismatch((args, kwargs))))

    def _in_form(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], Arguments, Spelling | None] | Reason:
        """Return the leaves and the arguments of a call in the sample's call form."""
        if self.parameters is not None and self.parameters.changed():
            return Reason(Kind.FORWARD_CHANGED)
        call: Arguments = args, kwargs
        leaves = self.leaves_of(args, kwargs)
        spelling: Spelling | None = None
        if leaves is None:
            found = self._spelling(args, kwargs)
            if isinstance(found, Reason):
                return found
            spelling = found
            args, kwargs = spelling.respelled(call)
            leaves = self.leaves_of(args, kwargs)
            if leaves is None:
                return Reason(
                    Kind.STRUCTURE, "a list, tuple or dict among them holds something else"
                )
        if self._unread:
            leaves = [self._unread.get(i, leaf) for i, leaf in enumerate(leaves)]
            args = tuple(leaves[: self.num_args])
            kwargs = dict(zip(self.keywords, leaves[self.num_args :], strict=True))
        return leaves, (args, kwargs), spelling

    def _spelling(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Spelling | Reason:
        key = len(args), tuple(kwargs)
        known = self._spellings.get(key)
        if known is not None:
            return known
        if self.parameters is None:
            return Reason(Kind.STRUCTURE, self._other_structure(args, kwargs))
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
        """Return the call forms that calls have used, except for the sample's.

        Each is the number of positional arguments, the keywords, and how to find the sample's
        arguments in such a call.
        """
        known = list(self._spellings.items())
        return [(*key, each) for key, each in known if isinstance(each, Spelling)]

    def mismatch(
        self, leaves: Sequence[Any], any_size: bool = False, numbers: Container[int] = ()
    ) -> Reason | None:
        """Return why ``leaves`` do not fit the signature; None if they do.

        With ``any_size``, shapes may differ, and the leaves at ``numbers`` may be any values.
        """
        for i, shape, dtype, device in self.tensors:
            leaf = leaves[i]
            if type(leaf) not in PLAIN:
                expected = f"compiled for a tensor {tuple(shape)}"
                return self._of(i, Kind.NOT_PLAIN, f"{shown(leaf)}, {expected}")
            if leaf.layout is not torch.strided or leaf.is_nested or leaf._is_zerotensor():
                return self._of(i, Kind.LAYOUT, f"layout {leaf.layout}")
            if not has_storage(leaf):
                return Reason(Kind.LEFT_TRANSFORM)
            if leaf.shape != shape and not any_size:
                text = f"shape {tuple(leaf.shape)}, compiled for {tuple(shape)}"
                return self._of(i, Kind.SHAPE, text)
            if leaf.dtype is not dtype:
                text = f"dtype {leaf.dtype}, compiled for {dtype}"
                return self._of(i, Kind.DTYPE, text)
            if leaf.device != device:
                text = f"device {leaf.device}, compiled for {device}"
                return self._of(i, Kind.DEVICE, text)
        for i, value in self.constants:
            leaf = leaves[i]
            if leaf is not value and i not in numbers and not same_value(leaf, value):
                return other_constant(self.names[i], leaf, value)
        for i, known in self.numbers.items():
            if i not in numbers and not known.holds(leaves[i]):
                text = f"{shown(leaves[i])}, compiled for any {known}"
                return self._of(i, Kind.NUMBER, text)
        return None

    def _of(self, number: int, kind: Kind, text: str) -> Reason:
        return Reason(kind, f"argument `{self.names[number]}`: {text}")

    def __str__(self) -> str:
        shapes = ", ".join(
            f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"
            for _, shape, dtype, _ in self.tensors
        )
        return f"({shapes})"


def _shape_of(tensor: torch.Tensor) -> torch.Size:
    """Return the shape of ``tensor``; an empty one for a strided nested tensor, which has none."""
    return torch.Size() if has_no_shape(tensor) else tensor.shape


def has_plain_names(kwargs: Mapping[str, Any]) -> bool:
    """Whether all keywords are exactly of class ``str``, and none is of a subclass."""
    return _TEXT.issuperset(map(type, kwargs))


def with_plain_names(
    kwargs: Mapping[str, Any], forward: Callable[..., Any]
) -> dict[str, Any] | None:
    """Return ``kwargs`` with names of class ``str``; None if ``forward`` could see a difference."""
    if _unnamed(forward, [k for k in kwargs if type(k) is not str]):
        return None
    return {plain_text(name): value for name, value in kwargs.items()}


def nearest(mismatches: Sequence[Reason]) -> Reason | None:
    """Return the mismatch to report: preferably of a signature with the call's structure."""
    alike = (m for m in mismatches if m.kind is not Kind.STRUCTURE)
    return next(alike, mismatches[-1] if mismatches else None)


def _names(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], forward: Callable[..., Any] | None
) -> list[str]:
    """Return the names of the arguments' leaves for messages."""
    placed = dict(enumerate(_placed(forward)))
    named = [*((placed.get(i, str(i)), value) for i, value in enumerate(args)), *kwargs.items()]
    return [f"{name}{path}" for name, value in named for path in _paths(value)]


def _paths(value: Any) -> list[str]:
    """Return the path of each leaf within an argument, as text."""
    try:
        return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(value)[0]]
    except ValueError:  # a class registered with pytree need not give paths
        return [f", leaf {i}" for i, _ in enumerate(pytree.tree_leaves(value))]


def _unread(parameters: Parameters | None, count: int, keywords: tuple[str, ...]) -> set[int | str]:
    """Return the arguments, by position or keyword, that forward does not read."""
    bound = parameters.bound(count, keywords) if parameters is not None else None
    if parameters is None or bound is None:
        return set()
    return {place for parameter, place in bound.items() if parameters.is_unread(parameter)}


def _placed(forward: Callable[..., Any] | None) -> list[str]:
    """Return the names of forward's positional parameters; of a wrapper, the wrapped function's."""
    with suppress(TypeError, ValueError):
        parameters = inspect.signature(forward).parameters if forward is not None else {}
        return [name for name, p in parameters.items() if p.kind in _PLACED]
    return []


def _unnamed(forward: Callable[..., Any], kwargs: Iterable[str]) -> tuple[str, ...]:
    """Return the keywords that ``forward`` has no parameter for and takes by ``**kwargs``."""
    try:
        named = inspect.signature(forward).parameters
    except (TypeError, ValueError):
        return tuple(kwargs)
    return tuple(k for k in kwargs if k not in named)
