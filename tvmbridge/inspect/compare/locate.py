"""Which operator a departure comes from: two traces, matched by their values.

Programs before and after a stage have other operators, other names and another order; what they
share are values. A value of one trace that stands nowhere in the other is *lost*. From a departing
result one walks back through lost values only; where the walk ends, all operands agree and the
value does not: there stands the operator that the stage gets wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tvmbridge.inspect.compare.trace import Step, Trace


@dataclass(frozen=True)
class Finding:
    """The operator of the program before a stage whose value the stage does not reproduce.

    ``before`` is None where the stage only adds values; ``after`` are the steps of the stage that
    stand in its place, the first one first.
    """

    before: Step | None
    after: tuple[Step, ...]

    @property
    def operator(self) -> str:
        """The operator before the stage, and after it what has taken its place."""
        if self.before is None:
            return self.after[0].operator if self.after else "unknown"
        return self.before.operator

    @property
    def becomes(self) -> str:
        """The operators that have taken its place."""
        names = [step.operator for step in self.after]
        return ", ".join(dict.fromkeys(n for n in names if n != "result"))

    @property
    def source(self) -> str:
        """The line of Python that what has taken its place comes from."""
        return self.after[0].source if self.after else ""


class Values:
    """The values of a trace, to be looked up by their numbers."""

    def __init__(self, steps: Sequence[Step]) -> None:
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
        """A value of this trace that equals value ``number`` of ``other``, in any shape."""
        flat, (total, size) = other._flat[number], other._sums[number]
        bound = tolerance * float(flat.abs().max()) if flat.numel() else 0.0
        for candidate in self._by_count[flat.numel()]:
            sums = self._sums[candidate]
            if abs(sums[0] - total) > tolerance * size + 1e-300:
                continue
            if not flat.numel() or float((self._flat[candidate] - flat).abs().max()) <= bound:
                return candidate
        return None


class Matching:
    """Two traces with their common values, to within ``tolerance`` of each value's magnitude."""

    def __init__(self, before: Trace, after: Trace, tolerance: float) -> None:
        self.before, self.after = before, after
        left, right = Values(before.steps), Values(after.steps)
        self.in_after = [right.find(left, n, tolerance) for n in range(len(before.steps))]
        self.in_before = [left.find(right, n, tolerance) for n in range(len(after.steps))]

    def locate(self, result: str) -> Finding:
        """The operator behind the departure of ``result``."""
        lost = _lost(self.before, result, self.in_after)
        new = _lost(self.after, result, self.in_before)
        fronts = _front(self.after, new)
        started_from = {n for number in fronts for n in self._roots(number)}
        candidates = [
            number
            for number in _front(self.before, lost)
            if {self.in_after[o] for o in self.before.steps[number].operands} & started_from
        ] or _front(self.before, lost)
        if not candidates:
            return Finding(None, tuple(self.after.steps[n] for n in new[:1]))
        chosen = candidates[0]
        operands = {self.in_after[o] for o in self.before.steps[chosen].operands}
        placed = [n for n in fronts if operands & set(self._roots(n))] or fronts
        replaced = self._until_read_again(chosen, _onward(placed, new))
        return Finding(self.before.steps[chosen], tuple(self.after.steps[n] for n in replaced))

    def _until_read_again(self, chosen: int, placed: list[int]) -> list[int]:
        """``placed`` up to what reads the value as it was read before the stage."""
        readers = [
            {self.in_after[o] for o in step.operands if o != chosen} - {None}
            for step in self.before.steps
            if chosen in step.operands
        ]
        for position, number in enumerate(placed[1:], start=1):
            roots = set(self._roots(number))
            if any(others and others <= roots for others in readers):
                return placed[:position]
        return placed

    def _roots(self, number: int) -> list[int]:
        """Representatives of the operands of a step of ``after``."""
        roots = []
        for operand in self.after.steps[number].operands:
            counterpart = self.in_before[operand]
            again = None if counterpart is None else self.in_after[counterpart]
            roots.append(operand if again is None else again)
        return roots


def _onward(placed: list[int], new: list[int]) -> list[int]:
    """The first of ``placed`` and the lost values behind it, at most a handful."""
    if not placed:
        return new[:1]
    return [n for n in new if n >= placed[0]][:8]


def _lost(trace: Trace, result: str, matched: list[int | None]) -> list[int]:
    """The lost values that lead to ``result`` through lost values, in order."""
    start = trace.results.get(result)
    found: set[int] = set()
    pending = [] if start is None else [start]
    while pending:
        number = pending.pop()
        if number in found or not trace.steps[number].operator:
            continue
        if matched[number] is not None and number != start:
            continue
        found.add(number)
        pending.extend(trace.steps[number].operands)
    return sorted(found)


def _front(trace: Trace, lost: list[int]) -> list[int]:
    """The lost values none of whose operands is lost."""
    inside = set(lost)
    return [n for n in lost if not inside & set(trace.steps[n].operands)]


def source_of(step: Step, program: Trace, tolerance: float) -> str:
    """The user's line that a step comes from: that of the same value in ``program``."""
    found = Values(program.steps).find(Values([step]), 0, tolerance)
    return "" if found is None else program.steps[found].source
