"""Tiles of a product of float32 matrices: blocks of the result that are computed in registers.

The method is from Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication"
(2008).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.schedules.indexing import integer
from tvmbridge.schedules.loops import allocate, load, loop, store, vector_loop
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.product_operands import DTYPE, Matrix, Panel, Panels, Prefetch
from tvmbridge.schedules.reader import Buffer

# Vectors in a row of a tile, and rows of a tile (with AVX-512, and with AVX2). Enough vectors hide
# the latency of multiplications, and registers must remain for operands. AVX-512 has 32 registers,
# AVX2 has 16.
_VECTORS = 2
_HIGH, _LOW = 8, 6
# The depth is summed in blocks of this length, whose sums are then added: as in libraries, this
# keeps rounding errors small.
_BLOCK = 256
# Parts of the work for each core: several, in case one core is slower than others.
PARTS = 4
# A part with at least these rows, and more elements of the left operand, copies the columns that it
# reads: its tiles then read one stream of aligned vectors. Measured with AVX2: 43 and 66 GFLOP/s
# for 256 rows, 196 columns and a depth of 2304; 68 and 60 for 64 rows and a depth of 256.
_COPIED_ROWS, _COPIED_WORK = 48, 1 << 16
# A longer copy is in no core's cache.
_COPIED_DEPTH = 1 << 13

_Element = Callable[[Expr, Expr], tirx.Stmt]
_Term = Callable[[Expr, Expr], Expr]
Write = Callable[[Buffer, Expr, Expr], list[tirx.Stmt]]


def height_of(machine: Machine) -> int:
    """Return the number of rows of a tile."""
    return _HIGH if machine.lanes >= 16 else _LOW


def width_of(machine: Machine) -> int:
    """Return the number of columns of a tile."""
    return machine.lanes * _VECTORS


@dataclass(frozen=True)
class Tile:
    """The size of a tile that is held in registers.

    - ``height``: the number of rows.
    - ``lanes``: the number of elements of a vector; a row has ``_VECTORS`` vectors.
    """

    height: int
    lanes: int

    @property
    def width(self) -> int:
        return self.lanes * _VECTORS

    def registers(self, name: str) -> tuple[Buffer, tirx.Stmt]:
        return allocate([self.height, self.width], DTYPE, name)

    def summed(
        self, sums: Buffer, length: int, terms: Callable[[Expr], list[_Term]]
    ) -> list[tirx.Stmt]:
        """Return the statements that clear ``sums`` and add the terms of ``length`` steps.

        ``terms(i)`` returns the terms of step ``i``, as functions of row and column.
        """
        return [self.cleared(sums), loop(length, lambda i: self.added(sums, terms(i)))]

    def added(self, sums: Buffer, terms: list[_Term]) -> list[tirx.Stmt]:
        """Return the statements that add the terms of a step to ``sums``."""

        def added(term: _Term) -> tirx.Stmt:
            return self.each(lambda r, c: store(sums, load(sums, r, c) + term(r, c), r, c))

        return [added(term) for term in terms]

    def cleared(self, sums: Buffer) -> tirx.Stmt:
        return self.each(lambda r, c: store(sums, tirx.const(0.0, DTYPE), r, c))

    def each(self, element: _Element) -> tirx.Stmt:
        """Return ``element(row, column)`` of a tile, unrolled: LLVM keeps the tile in registers."""

        def vectors(row: Expr) -> list[tirx.Stmt]:
            def vector(number: Expr) -> list[tirx.Stmt]:
                first = number * integer(self.lanes)
                return [vector_loop(self.lanes, lambda lane: [element(row, first + lane)])]

            return [loop(_VECTORS, vector, tirx.ForKind.UNROLLED)]

        return loop(self.height, vectors, tirx.ForKind.UNROLLED)


class Tiles:
    """Generates the tiles of a matrix product.

    - ``depth``: the number of products in a sum.
    - ``left``: returns the element of the left operand at a row and a depth.
    - ``right``: the right operand.
    - ``height``: the number of rows of a tile; None: the most that registers hold.
    - ``copies``: whether parts with many rows copy the columns of ``right`` that they read.
    """

    def __init__(
        self,
        machine: Machine,
        depth: int,
        left: Callable[[Expr, Expr], Expr],
        right: Matrix | Panels | Panel,
        height: int | None = None,
        *,
        copies: bool = False,
    ) -> None:
        self.depth, self.left, self.right, self.copies = depth, left, right, copies
        self.machine = machine
        self.cores, self.shape = machine.cores, Tile(height or height_of(machine), machine.lanes)
        self.height, self.width, self.each = self.shape.height, self.shape.width, self.shape.each

    def loops(self, rows: int, columns: int, write: Write) -> tirx.Stmt:
        """Return a parallel loop over all tiles of the result.

        The loop runs over panels of columns; few panels are cut into parts of their rows.
        ``write(sums, row, column)`` returns the statements that store a tile.
        """
        panels, count = -(-columns // self.width), -(-rows // self.height)
        tiles_of_part = -(-count // min(count, -(-PARTS * self.cores // panels)))
        parts = -(-count // tiles_of_part)
        copies = self.copies and _copies(tiles_of_part * self.height, self.depth)

        def part(number: Expr) -> list[tirx.Stmt]:
            panel = number // integer(parts)
            column = start_of(panel, self.width, columns)
            first = number % integer(parts) * integer(tiles_of_part)
            copied, tiles = self._copied(column) if copies else ([], self)

            def tile(i: Expr) -> list[tirx.Stmt]:
                row = start_of(first + i, self.height, rows)
                return tiles.tile(row, column, write, self._prefetch(panel, first + i, count))

            return [*copied, loop(tiles_of_part, tile)]

        return loop(panels * parts, part, kind_of(self.cores))

    def _copied(self, column: Expr) -> tuple[list[tirx.Stmt], Tiles]:
        """Return the statements that copy a tile's columns, and the tiles that read the copy."""
        copy, room = allocate([self.depth, self.width], DTYPE, "panel")

        def line(k: Expr) -> list[tirx.Stmt]:
            def element(c: Expr) -> list[tirx.Stmt]:
                return [store(copy, self.right.beside(k, column, c), k, c)]

            return [vector_loop(self.width, element)]

        tiles = Tiles(self.machine, self.depth, self.left, Panel(copy), self.height)
        return [room, loop(self.depth, line)], tiles

    def _prefetch(self, panel: Expr, tile: Expr, tiles: int) -> Prefetch | None:
        return Prefetch(self.right, panel, tile, tiles) if isinstance(self.right, Panels) else None

    def tile(
        self, row: Expr, column: Expr, write: Write, prefetch: Prefetch | None = None
    ) -> list[tirx.Stmt]:
        sums, room = self.shape.registers("sums")
        if self.depth <= _BLOCK:
            added = self._added(sums, row, column, (integer(0), self.depth), prefetch)
            return [room, *added, *write(sums, row, column)]
        total, more = self.shape.registers("total")
        # The total is in memory between blocks: the order of its rows alternates from tile to tile,
        # so LLVM cannot index it by constants. Otherwise LLVM unrolls a loop over three blocks, has
        # more values than registers, and spills sums in its innermost loop (26% of the time).
        turned = (row // integer(self.height) + column // integer(self.width)) % integer(2)

        def place(r: Expr) -> Expr:
            return r + turned * (integer(self.height - 1) - integer(2) * r)

        def block(start: Expr, length: int) -> list[tirx.Stmt]:
            def add(r: Expr, c: Expr) -> tirx.Stmt:
                return store(total, load(total, place(r), c) + load(sums, r, c), place(r), c)

            return [*self._added(sums, row, column, (start, length), prefetch), self.each(add)]

        def move(r: Expr, c: Expr) -> tirx.Stmt:
            return store(sums, load(total, place(r), c), r, c)

        whole, rest = divmod(self.depth, _BLOCK)
        return [
            room,
            more,
            self.shape.cleared(total),
            loop(whole, lambda b: block(b * integer(_BLOCK), _BLOCK)),
            *(block(integer(whole * _BLOCK), rest) if rest else []),
            self.each(move),
            *write(sums, row, column),
        ]

    def _added(
        self,
        sums: Buffer,
        row: Expr,
        column: Expr,
        steps: tuple[Expr, int],
        prefetch: Prefetch | None,
    ) -> list[tirx.Stmt]:
        """Return the statements that sum up a tile over ``steps``: their start and length."""
        start, length = steps

        def term(k: Expr) -> list[_Term]:
            return [lambda r, c: self.left(row + r, k) * self.right.beside(k, column, c)]

        if prefetch is None:
            return self.shape.summed(sums, length, lambda i: term(start + i))
        every = min(prefetch.steps, length)
        count, rest = divmod(length, every)

        def added(first: Expr, length: int) -> tirx.Stmt:
            return loop(length, lambda i: self.shape.added(sums, term(first + i)))

        def some(number: Expr) -> list[tirx.Stmt]:
            fetched = prefetch.fetched(start, number, count)
            return [fetched, added(start + number * integer(every), every)]

        last = [added(start + integer(length - rest), rest)] if rest else []
        return [self.shape.cleared(sums), loop(count, some), *last]


def _copies(rows: int, depth: int) -> bool:
    return rows >= _COPIED_ROWS and rows * depth > _COPIED_WORK and depth <= _COPIED_DEPTH


def kind_of(cores: int) -> tirx.ForKind:
    return tirx.ForKind.PARALLEL if cores > 1 else tirx.ForKind.SERIAL


def start_of(number: Expr, size: int, extent: int) -> Expr:
    """Return the start of a tile; the last tiles may overlap and compute some elements twice."""
    return tirx.Min(number * integer(size), integer(extent - size))
