"""Reads: what forward learns beside the values of its tensors, and what it demands of these."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn


class Question(enum.Enum):
    """What forward may ask of tensors that their shapes and dtypes do not say."""

    LAYOUT = "how tensors lie in memory"
    OFFSET = "where in its memory a tensor starts"
    IDENTITY = "whether two tensors are one"
    CLASS = "of what class a tensor is"
    GRADIENTS = "for gradients where they are off, or whether a tensor requires one"
    COMPILED = "whether it is compiled"
    STARTED = "for the gradient of what it makes, where nothing given requires one"
    INFERENCE = "whether a result is made in inference mode"


class Holder(Protocol):
    """What a value is looked up in, as in a dict."""

    def get(self, name: str, default: Any, /) -> Any:
        """The value of ``name``, or ``default``."""


@dataclass(frozen=True)
class OutsideValue:
    """A value that forward reads and that is not the module's, as it was found.

    ``expected`` is a copy that no change reaches or, where the object ``itself`` matters and not
    what it holds, the object. Two with the same ``key`` are one. ``owner``: the module whose
    attribute it is, where deep copies of the dispatched module may have a copy of that.
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
    """What forward was told of the buffers ``names``, and how to ask again."""

    names: frozenset[str]
    ask: Callable[[Mapping[str, torch.Tensor]], Any]
    value: bool | int | float


@dataclass(frozen=True)
class Check:
    """What is raised where a check does not pass."""

    error: type[Exception]
    message: str
