"""Operands of a product of float32 matrices, as its tiles read them."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.schedules.indexing import integer
from tvmbridge.schedules.loops import load, loop, store
from tvmbridge.schedules.reader import Buffer

DTYPE = "float32"
# Elements in a cache line.
_LINE = 16


@dataclass(frozen=True)
class Matrix:
    """A matrix in a buffer.

    - ``batch``: the leading indices of the matrix in a batch; () if the buffer is one matrix.
    """

    buffer: Buffer
    batch: tuple[Expr, ...] = ()

    def at(self, row: Expr, column: Expr) -> Expr:
        return load(self.buffer, *self.batch, row, column)

    def beside(self, row: Expr, column: Expr, offset: Expr) -> Expr:
        return self.at(row, column + offset)

    def put(self, value: Expr, row: Expr, column: Expr) -> tirx.Stmt:
        return store(self.buffer, value, *self.batch, row, column)


@dataclass(frozen=True)
class Panels:
    """A matrix whose columns are packed by the width of a tile.

    The rows of a panel follow one another in memory, so that a tile reads one stream: in a matrix,
    each row of a tile is in another page. The last panel has the last columns, and may overlap with
    the one before.

    - ``buffer``: has the shape (panels, rows, width).
    """

    buffer: Buffer

    def beside(self, row: Expr, column: Expr, offset: Expr) -> Expr:
        width = int(self.buffer.shape[-1])
        panel = (column + integer(width - 1)) // integer(width)
        return load(self.buffer, panel, row, offset)


@dataclass(frozen=True)
class Prefetch:
    """Brings the next panel into the cache while the tiles of a panel are computed, a part in each.

    Processors prefetch only within a page of memory. On one core of an Intel Xeon with AVX-512,
    products of 128 rows with weights that no cache holds took 1.25 to 1.3 times as long without.

    - ``panels``: the right operand.
    - ``panel``: the number of the panel whose tiles are computed.
    - ``tile``: the number of the tile among those of the panel.
    - ``tiles``: the number of tiles of a panel.
    """

    panels: Panels
    panel: Expr
    tile: Expr
    tiles: int

    @property
    def steps(self) -> int:
        """The number of steps of a sum between two prefetches."""
        return max(1, self.tiles // self._lines_of_row)

    @property
    def _lines_of_row(self) -> int:
        return -(-int(self.panels.buffer.shape[-1]) // _LINE)

    def fetched(self, start: Expr, number: Expr, count: int) -> tirx.Stmt:
        """Return the statement that fetches lines at one of the steps of a sum.

        Args:
            start: the first row that the sum reads.
            number: the number of the step among those that prefetch.
            count: how many steps of the sum prefetch.
        """
        lines, at_once = self._lines_of_row, -(-self._lines_of_row // self.tiles)
        first = (self.tile * integer(count) + number) * integer(at_once)

        def line(i: Expr) -> list[tirx.Stmt]:
            row, place = (first + i) // integer(lines), (first + i) % integer(lines)
            # What follows the last panel is fetched too: a prefetch never fails.
            indices = self.panel + integer(1), start + row, place * integer(_LINE)
            return [_prefetched(load(self.panels.buffer, *indices))]

        return loop(at_once, line, tirx.ForKind.UNROLLED)


def _prefetched(element: Expr) -> tirx.Stmt:
    """Return the statement that fetches the cache line of ``element`` to be read soon."""
    reads, soon, data = (tirx.const(n, "int32") for n in (0, 3, 1))
    at = tirx.address_of(element)
    return tirx.Evaluate(tirx.call_intrin("void", "tirx.prefetch", at, reads, soon, data))


@dataclass(frozen=True)
class Panel:
    """The columns that a tile reads, copied to a buffer of the shape (rows, width)."""

    buffer: Buffer

    def beside(self, row: Expr, column: Expr, offset: Expr) -> Expr:
        return load(self.buffer, row, offset)
