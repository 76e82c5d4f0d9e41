"""A trace: every value that a program computed, in order, with its operator and operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tvmbridge.core.torch_private import pytree


@dataclass(frozen=True)
class TraceStep:
    """One value of a trace.

    - ``operator``: the operator that computed it; empty for an input.
    - ``source``: the user's source line; empty if it is unknown.
    - ``operands``: the numbers of the steps that it was computed from.
    """

    operator: str
    source: str
    operands: tuple[int, ...]
    value: torch.Tensor


class Trace:
    """The values of one run.

    A tensor is identified by its memory, because autograd returns a saved tensor as another Python
    object. All tensors are kept alive, so that no other tensor gets their memory.

    - ``steps``: the values in the order of their computation.
    - ``results``: for each result by name, the number of its step.

    Args:
        written: whether the program may write into its values, so that copies are recorded.
    """

    def __init__(self, *, written: bool = False) -> None:
        self.steps: list[TraceStep] = []
        self.results: dict[str, int] = {}
        self._written = written
        self._numbers: dict[Any, int] = {}
        self._alive: list[torch.Tensor] = []

    def add(
        self,
        value: torch.Tensor,
        operator: str = "",
        operands: Sequence[torch.Tensor] = (),
        source: str = "",
    ) -> int:
        """Record a value, and return the number of its step.

        Args:
            source: the user's source line; empty if it is unknown.
        """
        numbers = dict.fromkeys(n for n in map(self.number, operands) if n is not None)
        kept = value.detach().clone() if self._written else value.detach()
        self.steps.append(TraceStep(operator, source, tuple(numbers), kept))
        number = len(self.steps) - 1
        for tensor in (value, kept):
            self._alive.append(tensor)
            self._numbers[tensor.untyped_storage().data_ptr()] = number
            self._numbers[_place(tensor)] = number
        return number

    def number(self, value: torch.Tensor) -> int | None:
        """Return the step of a value; if not recorded, the last of its memory, or None."""
        found = self._numbers.get(_place(value))
        return self._numbers.get(value.untyped_storage().data_ptr()) if found is None else found

    def note_result(self, name: str, value: torch.Tensor) -> None:
        """Record ``value`` as the result called ``name``."""
        number = self.number(value)
        known = None if number is None else self.steps[number].value
        alike = known is not None and (known.shape, known.dtype) == (value.shape, value.dtype)
        if number is None or known is None or not alike or not torch.equal(known, value):
            number = self.add(value, "result", (value,))
        self.results[name] = number

    def result(self, name: str) -> torch.Tensor | None:
        """Return the result called ``name``; None if the program has no such result."""
        number = self.results.get(name)
        return None if number is None else self.steps[number].value


def _place(tensor: torch.Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a nested structure of lists, tuples and dicts."""
    leaves = pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
