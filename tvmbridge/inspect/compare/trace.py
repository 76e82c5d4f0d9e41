"""A trace: every value that a program computed, in order, and what it was computed from."""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')
FOREIGN = ("/torch/", "/tvmbridge/", "/contextlib.py", "<frozen", "<string>", "<eval_with_key>")


@dataclass(frozen=True)
class Step:
    """One value of a trace.

    ``operands`` are the numbers of the steps that it was computed from (none for an input),
    ``source`` the line of Python that it comes from, or empty where that is not known.
    """

    name: str
    operator: str
    source: str
    operands: tuple[int, ...]
    value: torch.Tensor

    @property
    def is_input(self) -> bool:
        """Whether it was given to the program, and not computed."""
        return self.operator == ""


@dataclass(frozen=True)
class Trace:
    """The values of one run; ``results`` gives for the name of a result the number of its step."""

    steps: tuple[Step, ...]
    results: Mapping[str, int]

    def result(self, name: str) -> torch.Tensor | None:
        """The result called ``name``; None: the program has no such result."""
        number = self.results.get(name)
        return None if number is None else self.steps[number].value


class TraceBuilder:
    """Collects the steps of a trace while the program runs."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.results: dict[str, int] = {}

    def given(self, name: str, value: torch.Tensor) -> int:
        """Add an input; returns the number of its step."""
        return self.computed(name, "", "", (), value)

    def computed(
        self, name: str, operator: str, source: str, operands: Sequence[int], value: torch.Tensor
    ) -> int:
        """Add a value; returns the number of its step."""
        unique = tuple(dict.fromkeys(operands))
        self.steps.append(Step(name, operator, source, unique, value.detach()))
        return len(self.steps) - 1

    def build(self) -> Trace:
        """The trace so far."""
        return Trace(tuple(self.steps), dict(self.results))


def user_source(stack_trace: str | None) -> str:
    """The user's own line in a Python traceback, as ``file:line in function: code``."""
    found = ""
    for line in (stack_trace or "").splitlines():
        frame = _FRAME.search(line)
        if frame is None:
            continue
        if not found or not any(part in frame[1] for part in FOREIGN):
            found = source_line(frame[1], int(frame[2]), frame[3])
    return found


def source_line(file: str, line: int, function: str) -> str:
    """``file:line in function: code``."""
    text = f"{file.rsplit('/', 1)[-1]}:{line} in {function}"
    code = linecache.getline(file, line).strip()
    return f"{text}: {code}" if code else text


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a nested structure of lists, tuples and dicts."""
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
