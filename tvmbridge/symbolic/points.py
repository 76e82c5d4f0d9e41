"""The sample sizes (points) at which a module is compiled, and the range that its code serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tvmbridge.symbolic.size import Point, Size
from tvmbridge.symbolic.sizes import Sizes
from tvmbridge.symbolic.symbols import LEAST_SIZE

# Forward may leave out some positions, so that one is left.
_SMALL_FLOOR = LEAST_SIZE + 3


@dataclass(frozen=True)
class Points:
    """The points (values of the symbols) at which a module is compiled.

    - ``least``, ``most``: the smallest and largest values of the symbols that the code serves.
    - ``middle``: values that are common in calls.
    - ``between``: further corners of the box from ``least`` to ``most``, and points in it.
    - ``traced``: the sizes in the shapes of the symbolic trace.
    - ``floors``: the least values at which no size in the trace is 1; empty: 2 each.
    """

    least: Point
    most: Point
    middle: Point
    between: tuple[Point, ...] = ()
    traced: tuple[Size, ...] = field(default=(), repr=False)
    floors: Point = ()

    @property
    def all(self) -> tuple[Point, ...]:
        """All points, first the middle, whose decisions the compilations at the others repeat."""
        return (self.middle, self.most, *self.between, self.least)

    def sizes(self, *, with_ones: bool = False) -> Sizes:
        """Return a new search for numbers of code as functions of the symbols.

        Args:
            with_ones: whether the code shall serve a small floor, and the size below a small floor
                that is a sample.
        """
        least = tuple(
            max(floor, n - 1) - (n == floor) if with_ones and n <= _SMALL_FLOOR else n
            for n, floor in zip(self.least, self._floors, strict=True)
        )
        return Sizes(self.all, self.traced, least)

    def ones(self, point: Point) -> tuple[int | None, ...]:
        """Return the sizes of ``point`` below the floors, and None for the others."""
        pairs = zip(point, self._floors, strict=True)
        return tuple(size if size < floor else None for size, floor in pairs)

    @property
    def _floors(self) -> Point:
        return self.floors or (LEAST_SIZE,) * len(self.least)

    def hold_symbols(self, point: Point) -> bool:
        """Whether ``point`` is in the range that the code serves, but for sizes below floors."""
        return self.hold(tuple(map(max, point, self._floors)))

    def hold(self, point: Sequence[int]) -> bool:
        """Whether ``point`` is in the range of sizes that the code serves."""
        bounds = zip(self.least, point, self.most, strict=True)
        return all(low <= size <= high for low, size, high in bounds)
