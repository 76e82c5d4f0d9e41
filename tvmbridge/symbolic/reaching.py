"""Find the largest sizes that code for any size serves, beyond those that it was compiled for.

Sample sizes are primes or twice primes: 254 is the largest one where a table has 256 places.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvmbridge.calls.arguments import Arguments
from tvmbridge.core.errors import CaptureError
from tvmbridge.graph_capture.any_size import SymbolicTrace, shapes_of
from tvmbridge.graph_capture.relations import expressions_in
from tvmbridge.symbolic.points import Points
from tvmbridge.symbolic.size import Point
from tvmbridge.symbolic.sizes import Sizes
from tvmbridge.symbolic.symbols import Symbols

# Where a symbol has no bound, the bound of forward counts up to this many times the largest sample.
_NEAR = 2
# At how many sizes beyond the largest sample the code is compared with the trace, at most.
_COMPARED = 8


@dataclass(frozen=True)
class Reach:
    """The code at some sample shapes, and the bounds of its symbols.

    - ``trace``, ``symbols``, ``sample``: the module with symbols, and its arguments.
    - ``points``: the sample shapes.
    - ``bounds``: the largest value of each symbol that calls may have; None: that is not known.
    """

    trace: SymbolicTrace
    symbols: Symbols
    sample: Arguments
    points: Points
    bounds: Sequence[int | None]

    @property
    def source(self) -> str:
        """A text that identifies what the result follows from, beside the sizes of the code."""
        if self._wanted == self.points.most:
            return ""
        relations = self.trace.relations
        of_trace = [*relations.guards, *relations.bounds.items(), *self._expressions]
        return f"{self._wanted} {self.symbols} {relations.shapes} {sorted(map(str, of_trace))}"

    def most(self, sizes: Sizes) -> Point:
        """Return the largest value of each symbol for which the code is right.

        It may be what the symbol's bound and forward permit, under three conditions. The trace
        branches there as at the sample shapes. The code computes the trace's sizes there. And no
        size of the code is smaller there than at the largest sample shape.

        Args:
            sizes: the numbers of the code as functions of the symbols.
        """
        most = self.points.most
        if self._wanted == most:
            return most
        at = [self._symbols_at(point) for point in sizes.points]
        if any(e.free_symbols - at[0].keys() for e in self._expressions):
            return most
        values = [tuple(int(e.subs(each)) for each in at) for e in self._expressions]
        of_code = list(map(sizes.find, values))

        def is_right(known: Point, further: Point) -> bool:
            """Whether code that is right at ``known`` is so at the larger sizes ``further``."""
            try:
                there = self._symbols_at(further)
            except (MemoryError, CaptureError):
                return False
            return all(
                size is None or size.at(further) == expected.subs(there)
                for size, expected in zip(of_code, self._expressions, strict=True)
            ) and all(s.at(further) >= s.at(known) for s in sizes.found if not s.remainder)

        for place, bound in enumerate(self._wanted):
            arounds = (most, _with(self.points.least, place, most[place]))
            if bound > most[place] and all(
                is_right(around, further)
                for around in arounds
                for further in _beyond(around, place, bound)
            ):
                most = _with(most, place, bound)
        return most

    @functools.cached_property
    def _wanted(self) -> Point:
        """The bounds of the symbols, or the greatest sizes that forward permits."""
        wanted = []
        for most, bound, group in zip(
            self.points.most, self.bounds, self.symbols.dimensions, strict=True
        ):
            forms = [(d, self.symbols.form(d)) for d in group]
            permitted = min((self.trace.relations.most(*d) - f.offset) // f.scale for d, f in forms)
            near = permitted if permitted <= _NEAR * most else most
            wanted.append(max(most, near if bound is None else min(bound, permitted)))
        return tuple(wanted)

    @functools.cached_property
    def _expressions(self) -> list[Any]:
        return expressions_in(self.trace.program)

    def _symbols_at(self, point: Point) -> dict[Any, int]:
        """Return the values of the trace's symbols at ``point``.

        Raises:
            CaptureError: forward branches there in another way than in the trace.
            MemoryError: arguments of these sizes do not fit in the address space.
        """
        shapes = shapes_of(self.symbols.probe(*self.sample, point))
        broken = self.trace.relations.broken(shapes)
        if broken is not None:
            raise CaptureError(broken)
        return self.trace.relations.symbols(shapes)


def _with(point: Point, place: int, size: int) -> Point:
    return (*point[:place], size, *point[place + 1 :])


def _beyond(around: Point, place: int, bound: int) -> list[Point]:
    """Return points from ``bound`` down to sizes beyond that of ``around``."""
    step = -(-(bound - around[place]) // _COMPARED)
    return [_with(around, place, size) for size in range(bound, around[place], -step)]
