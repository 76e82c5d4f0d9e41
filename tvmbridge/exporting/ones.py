"""Find the symbols of an exported function that may be 1, although no symbol of a trace is 1."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from tvmbridge.calls.arguments import Arguments
from tvmbridge.core.errors import BuildError, CaptureError
from tvmbridge.exporting.conditions import written_relations
from tvmbridge.graph_capture.any_size import SymbolicTrace, shapes_of
from tvmbridge.graph_capture.ones import compute_alike
from tvmbridge.symbolic.code import traced_for
from tvmbridge.symbolic.points import Points
from tvmbridge.symbolic.size import Point
from tvmbridge.symbolic.symbols import LEAST_SIZE, Symbols

# Each set of symbols that are 1 is traced once more: seven sets of three symbols.
_MOST_SYMBOLS = 3


@dataclass(frozen=True)
class OnesOfExport:
    """Compares the trace of symbolic code with traces in which some symbols are the constant 1.

    - ``names``: the names of the symbols' sizes.
    - ``trace``, ``points``: those of the code.
    """

    module: nn.Module
    sample: Arguments
    symbols: Symbols
    names: Sequence[str]
    trace: SymbolicTrace
    points: Points

    def served(self, least: Point) -> tuple[Point, list[list[Any]]]:
        """Return the least value of each symbol, and conditions on symbols that are 1.

        Args:
            least: the least value of each symbol that the loops are right for.
        """
        possible = [i for i, n in enumerate(least) if n < LEAST_SIZE]
        if len(possible) > _MOST_SYMBOLS:
            possible = []
        alone = [i for i in possible if self._is_alike({i})]
        conditions: list[list[Any]] = [
            ["or", *(["gt", self.names[i], self._size_of_one(i)] for i in chosen)]
            for chosen in _sets(alone)
            if not self._is_alike(set(chosen))
        ]
        return tuple(
            1 if i in alone else max(n, LEAST_SIZE) for i, n in enumerate(least)
        ), conditions

    def _size_of_one(self, number: int) -> int:
        """Return the size of the dimensions of a symbol that is 1."""
        return self.symbols.form(self.symbols.dimensions[number][0]).size(1)

    def _is_alike(self, ones: set[int]) -> bool:
        """Whether forward computes the same where the symbols ``ones`` are 1."""
        larger = tuple(i not in ones for i in range(len(self.names)))
        points = [
            tuple(n if is_larger else 1 for n, is_larger in zip(point, larger, strict=True))
            for point in self.points.all
        ]
        symbols = self.symbols.without([None if is_larger else 1 for is_larger in larger])
        sample = self.symbols.probe(*self.sample, points[0])
        try:
            trace = traced_for(
                self.module,
                symbols,
                sample,
                needs_grad=False,
                autocast=(),
                like=self.trace.decisions,
            )
        except (BuildError, CaptureError):
            return False
        names = list(itertools.compress(self.names, larger))
        relations = written_relations(self.trace.relations, self.symbols, self.names)
        further = written_relations(trace.relations, symbols, names)
        shapes = [shapes_of(self.symbols.probe(*self.sample, point)) for point in points]
        return (
            all(condition in relations for condition in further)
            and all(trace.relations.broken(each) is None for each in shapes)
            and compute_alike(self.trace, trace, shapes)
        )


def _sets(symbols: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the sets of at least two of ``symbols``."""
    for count in range(2, len(symbols) + 1):
        yield from itertools.combinations(symbols, count)
