"""Find the largest sizes that code for any size serves, beyond those that it was compiled for.

Sample sizes are primes or twice primes: 254 is the largest one where a table has 256 places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvmbridge.calls.arguments import Arguments
from tvmbridge.graph_capture.any_size import SymbolicTrace, shapes_of
from tvmbridge.graph_capture.relations import expressions_in
from tvmbridge.symbolic.code import Points
from tvmbridge.symbolic.declared import DeclaredDimension
from tvmbridge.symbolic.size import Point
from tvmbridge.symbolic.sizes import Sizes
from tvmbridge.symbolic.symbols import Symbols

# Where a Dim has no bound, the bound of forward counts up to this many times the largest sample.
_NEAR = 2


@dataclass(frozen=True)
class Reach:
    """The code at some sample shapes, and the bounds of its symbols.

    - ``trace``, ``symbols``, ``sample``: the module with symbols, and its arguments.
    - ``bounds``: the declaration of each symbol.
    - ``points``: the sample shapes.
    """

    trace: SymbolicTrace
    symbols: Symbols
    sample: Arguments
    bounds: Sequence[DeclaredDimension]
    points: Points

    def most(self, sizes: Sizes) -> Point:
        """Return the largest value of each symbol for which the code is right.

        A symbol may have the largest size that its Dim and forward permit, under three conditions.
        The trace branches there as at the sample shapes. The code computes the trace's sizes there.
        And no size of the code is smaller there than at the largest sample shape.

        Args:
            sizes: the numbers of the code as functions of the symbols.
        """
        most = self.points.most
        for place, bound in enumerate(self._wanted()):
            further = (*most[:place], bound, *most[place + 1 :])
            alone = (*self.points.least[:place], bound, *self.points.least[place + 1 :])
            before = (*alone[:place], most[place], *alone[place + 1 :])
            if self._is_right(most, further, sizes) and self._is_right(before, alone, sizes):
                most = further
        return most

    def _wanted(self) -> Point:
        """Return the bounds of the Dims, or the greatest sizes that forward permits."""
        wanted = []
        for most, bound, group in zip(
            self.points.most, self.bounds, self.symbols.dimensions, strict=True
        ):
            forms = [(d, self.symbols.form(d)) for d in group]
            permitted = min((self.trace.relations.most(*d) - f.offset) // f.scale for d, f in forms)
            near = permitted if permitted <= _NEAR * most else most
            wanted.append(max(most, near if bound.most is None else min(bound.most, permitted)))
        return tuple(wanted)

    def _is_right(self, known: Point, further: Point, sizes: Sizes) -> bool:
        """Whether code that is right at ``known`` is so at the larger sizes ``further``."""
        relations = self.trace.relations
        try:
            shapes = [
                shapes_of(self.symbols.probe(*self.sample, p)) for p in (*sizes.points, further)
            ]
        except MemoryError:
            return False
        if relations.broken(shapes[-1]) is not None:
            return False
        at = [relations.symbols(each) for each in shapes]
        for expression in expressions_in(self.trace.program):
            *values, expected = (expression.subs(each) for each in at)
            found = sizes.find(tuple(map(int, values)))
            if found is not None and found.at(further) != expected:
                return False
        return all(size.at(further) >= size.at(known) for size in sizes.found if not size.remainder)
