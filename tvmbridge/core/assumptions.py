"""Assumptions: values beside its tensors that forward reads, and checks that it makes of data."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn


class Question(enum.Enum):
    """A property, beyond the shapes and dtypes of tensors, that forward may read and branch on.

    The value completes a message that begins with "forward asks".
    """

    LAYOUT = "how tensors lie in memory"
    OFFSET = "where in its memory a tensor starts"
    IDENTITY = "whether two tensors are one"
    CLASS = "of what class a tensor is"
    GRADIENTS = "for gradients where they are off, or whether a tensor requires one"
    COMPILED = "whether it is compiled"
    STARTED = "for the gradient of what it makes, where nothing given requires one"
    INFERENCE = "whether a result is made in inference mode"


class Holder(Protocol):
    """Anything that a value can be looked up in by name, such as a dict."""

    def get(self, name: str, default: Any, /) -> Any:
        """Return the value of ``name``, or ``default``."""


@dataclass(frozen=True)
class OutsideValue:
    """A value outside the module that forward reads, such as a global variable.

    - ``holder``, ``name``: where the value is looked up, and by which name.
    - ``label``: the value's name for messages.
    - ``expected``: a copy of the value, which later changes do not affect; with ``itself``, the
      object.
    - ``key``: equal for two reads of the same value.
    - ``itself``: whether the identity of the object matters, not its contents.
    - ``owner``: the module whose attribute the value is, if a deep copy of the dispatched module
      may have its own copy of that module; otherwise None.
    """

    holder: Holder = field(repr=False)
    name: str
    label: str
    expected: Any
    key: tuple[int, str]
    itself: bool = False
    owner: nn.Module | None = None


@dataclass(frozen=True)
class Answer:
    """A Python value that forward computed from small buffers, or from arguments.

    It is computed from constants alone if ``names`` and ``arguments`` are empty.

    - ``names``: the names of the buffers.
    - ``arguments``: the places of the arguments (:func:`~tvmbridge.calls.arguments.places_of`).
    - ``ask``: computes the value again from the tensors by name or place; from arguments it
      computes a tensor with one element.
    - ``value``: the value in the trace.
    """

    names: frozenset[str]
    arguments: frozenset[str]
    ask: Callable[[Mapping[str, torch.Tensor]], Any]
    value: bool | int | float


@dataclass(frozen=True)
class Check:
    """The error, by class and message, to raise if a check that forward makes of data fails."""

    error: type[Exception]
    message: str
