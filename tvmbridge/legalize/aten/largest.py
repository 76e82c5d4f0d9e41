"""Maxima of windows over images, and their indices: over a window's rows first, then its columns.

The first step compares whole rows, which are contiguous. A position of a window beyond an edge of
the image is moved to the edge. That element is in the window anyway, so the maximum is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import te, tirx
from tvm.ir import Expr

from tvmbridge.legalize.elementwise import larger
from tvmbridge.legalize.functions import is_nan
from tvmbridge.legalize.lets import Lets


@dataclass(frozen=True)
class Taps:
    """The positions of windows along one dimension.

    - ``size``: the number of positions of a window.
    - ``step``: the distance from one window to the next.
    - ``edge``: the padding at each edge of the image.
    - ``extent``: the extent of the image.
    - ``count``: the number of windows.
    """

    size: int
    step: int
    edge: int
    extent: int
    count: int

    def of(self, index: Expr) -> list[Expr]:
        """Return the positions of window number ``index``, in order."""
        return [self._position(index, tap) for tap in range(self.size)]

    def _position(self, index: Expr, tap: int) -> Expr:
        first, last = tap - self.edge, (self.count - 1) * self.step + tap - self.edge
        position = index * self.step + first
        if first < 0:
            position = tirx.max(position, tirx.const(0, "int64"))
        if last >= self.extent:
            position = tirx.min(position, tirx.const(self.extent - 1, "int64"))
        return position


def largest(x: te.Tensor, rows: Taps, columns: Taps) -> te.Tensor:
    """Return the maxima of windows over the last two dimensions of ``x``; NaN wins."""
    return _along(_along(x, rows, -2), columns, -1)


def _along(x: te.Tensor, taps: Taps, axis: int) -> te.Tensor:
    def element(*i: Expr) -> Expr:
        lets = Lets()
        best: Expr | None = None
        for at in _moved(i, taps, axis):
            value = lets.bind(x(*at), "x")
            best = value if best is None else lets.bind(larger(value, best), "best")
        return lets.close(best)

    return te.compute(_shape(x, taps, axis), element, name="T_largest")


def places_of_largest(x: te.Tensor, rows: Taps, columns: Taps) -> te.Tensor:
    """Return the indices of the maxima that PyTorch returns: row times columns plus column.

    PyTorch returns the first of several equal elements, and the last of several NaNs.
    """
    values, found = _along(x, rows, -2), _rows(x, rows)

    def element(*i: Expr) -> Expr:
        lets = Lets()
        best: tuple[Expr, Expr, Expr] | None = None
        for at in _moved(i, columns, -1):
            column = tirx.Cast("int32", at[-1])
            new = lets.bind(values(*at), "value"), lets.bind(found(*at), "row"), column
            best = new if best is None else _chosen(lets, new, best)
        assert best is not None
        place = best[1] * tirx.const(columns.extent, "int32") + best[2]
        return lets.close(tirx.Cast("int64", place))

    return te.compute(_shape(values, columns, -1), element, name="T_places")


def _rows(x: te.Tensor, taps: Taps) -> te.Tensor:
    """Return the row of the largest element of each column of a window."""

    def element(*i: Expr) -> Expr:
        lets = Lets()
        best: Expr | None = None
        row: Expr | None = None
        for at in _moved(i, taps, -2):
            value, here = lets.bind(x(*at), "x"), tirx.Cast("int32", at[-2])
            if best is None:
                best, row = value, here
                continue
            better = tirx.Or(value > best, is_nan(value))
            row = lets.bind(tirx.Select(better, here, row), "row")
            best = lets.bind(tirx.Select(better, value, best), "best")
        return lets.close(row)

    return te.compute(_shape(x, taps, -2), element, name="T_rows")


def _chosen(
    lets: Lets, new: tuple[Expr, Expr, Expr], best: tuple[Expr, Expr, Expr]
) -> tuple[Expr, Expr, Expr]:
    """Return ``new`` if PyTorch prefers it to ``best``, otherwise ``best``.

    Each is the value, row and column of an element; ``new`` is of a later column.
    """
    value, row, _ = new
    old, old_row, _ = best
    after_nan = tirx.Or(tirx.Not(is_nan(old)), row >= old_row)
    larger_or_first = tirx.Or(value > old, tirx.And(value == old, row < old_row))
    better = tirx.Select(is_nan(value), after_nan, larger_or_first)
    chosen = [lets.bind(tirx.Select(better, a, b), "best") for a, b in zip(new, best, strict=True)]
    return chosen[0], chosen[1], chosen[2]


def _moved(indices: Sequence[Expr], taps: Taps, axis: int) -> list[list[Expr]]:
    """Return ``indices`` for each position of a window along ``axis``."""
    moved = []
    for position in taps.of(indices[axis]):
        at = list(indices)
        at[axis] = position
        moved.append(at)
    return moved


def _shape(x: te.Tensor, taps: Taps, axis: int) -> list[int]:
    shape = [int(extent) for extent in x.shape]
    shape[axis] = taps.count
    return shape
