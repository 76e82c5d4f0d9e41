"""Number inputs: Python numbers among forward's arguments that are inputs of compiled code.

The compiled code reads a zero-dimensional tensor of int64 or float64. In the arguments of a
compilation, a number of class :class:`IntInput` or :class:`FloatInput` marks such an input. Code
that runs forward in eager PyTorch may pass the marked number like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

# Within these limits, results of a few products and sums are exact in int64, and conversions to
# float32 do not overflow.
_LEAST, _MOST = 1 - (1 << 31), (1 << 31) - 1
_MOST_FLOAT = torch.finfo(torch.float32).max
_DTYPES: dict[type, torch.dtype] = {int: torch.int64, float: torch.float64}


class IntInput(int):
    """An integer that becomes an input of compiled code."""


class FloatInput(float):
    """A float that becomes an input of compiled code."""


_MARKS: dict[type, type] = {int: IntInput, float: FloatInput}


@dataclass(frozen=True)
class Condition:
    """A comparison in forward with a number that is computed from an input.

    - ``computed``: returns the compared number for a value of the input.
    - ``comparison``: a function of :mod:`operator`, such as ``operator.lt``.
    - ``other``: the number on the right side.
    - ``outcome``: the result for which the code was compiled.
    """

    computed: Callable[[Any], Any]
    comparison: Callable[[Any, Any], bool]
    other: float
    outcome: bool

    def holds(self, value: Any) -> bool:
        """Whether the comparison has the outcome for ``value``; no if Python raises an error."""
        try:
            return self.comparison(self.computed(value), self.other) is self.outcome
        except (ArithmeticError, ValueError):  # such as int(nan)
            return False


@dataclass
class NumberRange:
    """The values of one number that compiled code serves.

    - ``kind``: ``int`` or ``float``; other classes, such as bool, are not served.
    - ``least``, ``most``: the limits, both included. NaN and infinities are within the limits of a
      float.
    - ``nonzero``: whether zero is left out.
    - ``sample``: the value for which code is compiled; None: it is not known.
    - ``conditions``: the comparisons by which forward branches, with their outcomes.
    """

    kind: type
    least: float = field(default=-math.inf)
    most: float = field(default=math.inf)
    nonzero: bool = False
    sample: float | None = None
    conditions: list[Condition] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = (_LEAST, _MOST) if self.kind is int else (-_MOST_FLOAT, _MOST_FLOAT)
        self.least, self.most = max(self.least, limits[0]), min(self.most, limits[1])

    def holds(self, value: Any) -> bool:
        """Whether the code serves ``value``."""
        if type(value) is not self.kind:
            return False
        if not all(condition.holds(value) for condition in self.conditions):
            return False
        return self.admits(value)

    def admits(self, value: Any) -> bool:
        """Whether the code serves ``value``, if no comparison of forward decides against it."""
        if not isinstance(value, int | float) or type(value) is not self.kind:
            return False
        if self.nonzero and not value:
            return False
        if self.least <= value <= self.most:
            return True
        limited = self.least > -_MOST_FLOAT or self.most < _MOST_FLOAT
        return self.kind is float and not math.isfinite(value) and not limited

    def __str__(self) -> str:
        limits = f" from {self.least} to {self.most}"
        branches = f", {len(self.conditions)} comparisons" if self.conditions else ""
        return f"{self.kind.__name__}{limits}{' but 0' if self.nonzero else ''}{branches}"

    def decided(
        self,
        computed: Callable[[Any], Any],
        comparison: Callable[[Any, Any], bool],
        other: float,
    ) -> bool:
        """Return the outcome of a comparison for the sample, and leave out values with another.

        Args:
            computed: returns the compared number for a value of the input.
        """
        outcome = bool(comparison(computed(self.sample), other))
        self.conditions.append(Condition(computed, comparison, other, outcome))
        return outcome

    def narrow(self, other: NumberRange) -> None:
        """Leave out the values that ``other`` leaves out."""
        self.least, self.most = max(self.least, other.least), min(self.most, other.most)
        self.nonzero |= other.nonzero
        self.conditions += other.conditions


def is_number(value: Any) -> bool:
    """Whether ``value`` may become an input: exactly an int or a float, and no bool."""
    return type(value) in _DTYPES


def number_inputs(leaves: Sequence[Any]) -> dict[int, NumberRange]:
    """Return a new range for each marked number among ``leaves``, by position."""
    marks = {i: leaf for i, leaf in enumerate(leaves) if type(leaf) in _KINDS}
    return {i: NumberRange(_KINDS[type(m)], sample=m) for i, m in marks.items()}


def as_tensor(value: float) -> torch.Tensor:
    """Return the zero-dimensional tensor that compiled code reads in place of ``value``."""
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def with_tensors(leaves: Sequence[Any]) -> list[Any]:
    """Return ``leaves`` with tensors in place of the marked numbers."""
    return [as_tensor(leaf) if type(leaf) in _KINDS else leaf for leaf in leaves]


def marked(leaves: Sequence[Any], numbers: Mapping[int, Any]) -> list[Any]:
    """Return ``leaves`` with marked numbers at the positions of ``numbers``."""
    found = list(leaves)
    for i in numbers:
        value = found[i].item() if isinstance(found[i], torch.Tensor) else found[i]
        found[i] = _MARKS[type(value)](value)
    return found


_KINDS: dict[type, type] = {mark: kind for kind, mark in _MARKS.items()}
