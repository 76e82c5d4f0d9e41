"""Find the operator behind a departure by matching the values of two traces.

The programs before and after a stage differ in operators, names and order, but share values. A
value of one trace that the other trace does not have is *lost*. The search walks back from a
departing result through lost values only. Where it ends, all operands of a value agree but the
value does not: the stage gets the operator of this value wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tvmbridge.core.reached import reached
from tvmbridge.inspect.compare.trace import Trace, TraceStep


@dataclass(frozen=True)
class Finding:
    """The operator whose value a stage does not reproduce.

    - ``operator``: the operator in the program before the stage.
    - ``becomes``: the names of the operators that replace it after the stage.
    - ``before``: its step in the trace before the stage; None if the stage only adds values.
    - ``source``: the user's source line of its replacement; empty if it is unknown.
    """

    operator: str
    becomes: str
    before: TraceStep | None
    source: str


class Values:
    """Finds the step of a trace whose value has given elements."""

    def __init__(self, steps: Sequence[TraceStep]) -> None:
        self._by_count: dict[int, list[int]] = defaultdict(list)
        self._sums: list[tuple[float, float]] = []
        self._flat: list[torch.Tensor] = []
        for number, step in enumerate(steps):
            flat = step.value.reshape(-1).double()
            flat = flat.nan_to_num(0.0, 1e300, -1e300).clamp(-1e300, 1e300)
            self._flat.append(flat)
            self._sums.append((float(flat.sum()), float(flat.abs().sum())))
            self._by_count[flat.numel()].append(number)

    def find(self, other: Values, number: int, tolerance: float) -> int | None:
        """Return a step of this trace whose value equals that of step ``number`` of ``other``.

        The shapes may differ, but not the number of elements. None: there is no such step.
        """
        flat, (total, size) = other._flat[number], other._sums[number]
        bound = tolerance * float(flat.abs().max()) if flat.numel() else 0.0
        for candidate in self._by_count[flat.numel()]:
            if abs(self._sums[candidate][0] - total) > tolerance * size + 1e-300:
                continue
            if not flat.numel() or float((self._flat[candidate] - flat).abs().max()) <= bound:
                return candidate
        return None


class Matching:
    """Two traces with their common values, equal within ``tolerance`` times their magnitude."""

    def __init__(self, before: Trace, after: Trace, tolerance: float) -> None:
        self._before, self._after = before, after
        left, right = Values(before.steps), Values(after.steps)
        self._in_after = [right.find(left, n, tolerance) for n in range(len(before.steps))]
        self._in_before = [left.find(right, n, tolerance) for n in range(len(after.steps))]

    def locate(self, result: str) -> Finding:
        """Find the operator behind the departure of ``result``."""
        new = _lost(self._after, result, self._in_before)
        fronts = _front(self._after, new)
        starts = {root for number in fronts for root in self._roots(number)}
        lost = _front(self._before, _lost(self._before, result, self._in_after))
        if not lost:
            added = [self._after.steps[n] for n in new[:1]]
            return _finding(None, added)
        chosen = next((n for n in lost if self._operands(n) & starts), lost[0])
        operands = self._operands(chosen)
        placed = [n for n in fronts if operands & self._roots(n)] or fronts
        # The first replacing step and the lost values after it, at most eight.
        behind = [n for n in new if n >= placed[0]][:8] if placed else new[:1]
        return _finding(
            self._before.steps[chosen],
            [self._after.steps[n] for n in self._until_read_again(chosen, behind)],
        )

    def _until_read_again(self, chosen: int, placed: list[int]) -> list[int]:
        """Cut ``placed`` before the first step that corresponds to a reader of the lost value.

        Such a step reads the same other operands as a reader of ``chosen`` before the stage.
        """
        readers = [
            {self._in_after[o] for o in step.operands if o != chosen} - {None}
            for step in self._before.steps
            if chosen in step.operands
        ]
        for position, number in enumerate(placed[1:], start=1):
            roots = self._roots(number)
            if any(others and others <= roots for others in readers):
                return placed[:position]
        return placed

    def _operands(self, number: int) -> set[int | None]:
        """Return the operands of a step before the stage, by their numbers after the stage."""
        return {self._in_after[o] for o in self._before.steps[number].operands}

    def _roots(self, number: int) -> set[int | None]:
        """Return the operands of a step after the stage, with one number for equal values."""
        roots: set[int | None] = set()
        for operand in self._after.steps[number].operands:
            counterpart = self._in_before[operand]
            again = None if counterpart is None else self._in_after[counterpart]
            roots.add(operand if again is None else again)
        return roots


def _finding(before: TraceStep | None, after: Sequence[TraceStep]) -> Finding:
    names = dict.fromkeys(step.operator for step in after)
    becomes = ", ".join(n for n in names if n != "result")
    operator = next(iter(names), "unknown") if before is None else before.operator
    return Finding(operator, becomes, before, after[0].source if after else "")


def _lost(trace: Trace, result: str, matched: list[int | None]) -> list[int]:
    """Return the lost values that lead to ``result`` through lost values only, in order."""
    start = trace.results.get(result)
    if start is None:
        return []

    def is_lost(number: int) -> bool:
        unmatched = matched[number] is None or number == start
        return unmatched and bool(trace.steps[number].operator)

    read = reached([start], lambda n: trace.steps[n].operands if is_lost(n) else ())
    return sorted(filter(is_lost, read))


def _front(trace: Trace, lost: list[int]) -> list[int]:
    """Return the lost values that have no lost operands."""
    inside = set(lost)
    return [n for n in lost if not inside & set(trace.steps[n].operands)]


def source_of(step: TraceStep, program: Trace, tolerance: float) -> str:
    """Return the user's source line of the step in ``program`` that has the same value."""
    found = Values(program.steps).find(Values([step]), 0, tolerance)
    return "" if found is None else program.steps[found].source
