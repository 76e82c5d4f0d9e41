"""A trace: every value that a program computed, in order, and what it was computed from."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tvmbridge.core.torch_private import pytree
from tvmbridge.frontend.origins import user_frame


@dataclass(frozen=True)
class TraceStep:
    """One value of a trace.

    ``operator`` is empty for an input, ``operands`` are the numbers of the steps that it was
    computed from, ``source`` is the line of Python that it comes from, where that is known.
    """

    operator: str
    source: str
    operands: tuple[int, ...]
    value: torch.Tensor


class Trace:
    """The values of one run; ``results`` gives the number of the step of each result, by name.

    Tensors are told apart by their memory, so that nobody has to number them: saved for backward,
    one comes back as another object. They are kept alive, or others would get their memory.

    Args:
        written: the program may write into its values, so that copies of them are noted.
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
        """Note a value, without operator an input; returns the number of its step."""
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
        """The step of a value, or the last one in its memory; None: it was not noted."""
        found = self._numbers.get(_place(value))
        return self._numbers.get(value.untyped_storage().data_ptr()) if found is None else found

    def note_result(self, name: str, value: torch.Tensor) -> None:
        """Note that ``value`` is the result called ``name``."""
        number = self.number(value)
        known = None if number is None else self.steps[number].value
        alike = known is not None and (known.shape, known.dtype) == (value.shape, value.dtype)
        if number is None or known is None or not alike or not torch.equal(known, value):
            number = self.add(value, "result", (value,))
        self.results[name] = number

    def result(self, name: str) -> torch.Tensor | None:
        """The result called ``name``; None: the program has no such result."""
        number = self.results.get(name)
        return None if number is None else self.steps[number].value


def _place(tensor: torch.Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def user_source(stack_trace: str | None) -> str:
    """The user's own line in a Python traceback, as ``file:line in function: code``."""
    frame = user_frame(stack_trace or "")
    if frame is None:
        return ""
    file, line, function = frame
    text = f"{file.rsplit('/', 1)[-1]}:{line} in {function}"
    code = linecache.getline(file, line).strip()
    return f"{text}: {code}" if code else text


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a nested structure of lists, tuples and dicts."""
    leaves = pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
