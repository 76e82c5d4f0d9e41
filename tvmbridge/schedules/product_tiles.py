"""Tiles of a product of float32 matrices: what of the result lies in registers at a time.

The tiles are those of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication"
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
from tvmbridge.schedules.reader import Buffer

DTYPE = "float32"
# Vectors of a tile: as many as hide the latency of a multiplication, and leave registers for
# operands. AVX-512 has 32 registers, AVX2 has 16.
_VECTORS = 2
_HIGH, _LOW = 8, 6
# So many products are added up, and then the sums: that keeps roundings few, as libraries do.
_BLOCK = 256
# Parts of the work for each core, should one be slower than others.
PARTS = 4

_Element = Callable[[Expr, Expr], tirx.Stmt]
_Terms = Callable[[Expr], list[Callable[[Expr, Expr], Expr]]]
Write = Callable[[Buffer, Expr, Expr], list[tirx.Stmt]]


@dataclass(frozen=True)
class Matrix:
    """A matrix in a buffer: all of it, or one of a batch."""

    buffer: Buffer
    batch: tuple[Expr, ...] = ()

    def at(self, row: Expr, column: Expr) -> Expr:
        return load(self.buffer, *self.batch, row, column)

    def put(self, value: Expr, row: Expr, column: Expr) -> tirx.Stmt:
        return store(self.buffer, value, *self.batch, row, column)


def height_of(machine: Machine) -> int:
    """The rows of a tile."""
    return _HIGH if machine.lanes >= 16 else _LOW


def width_of(machine: Machine) -> int:
    """The columns of a tile."""
    return machine.lanes * _VECTORS


@dataclass(frozen=True)
class Tile:
    """Rows of vectors of ``lanes`` numbers, which lie in registers."""

    height: int
    lanes: int

    @property
    def width(self) -> int:
        return self.lanes * _VECTORS

    def registers(self, name: str) -> tuple[Buffer, tirx.Stmt]:
        return allocate([self.height, self.width], DTYPE, name)

    def summed(self, sums: Buffer, length: int, terms: _Terms) -> list[tirx.Stmt]:
        """``sums`` of ``terms`` of each of ``length`` steps."""

        def step(i: Expr) -> list[tirx.Stmt]:
            def added(term: Callable[[Expr, Expr], Expr]) -> tirx.Stmt:
                return self.each(lambda r, c: store(sums, load(sums, r, c) + term(r, c), r, c))

            return [added(term) for term in terms(i)]

        return [self.cleared(sums), loop(length, step)]

    def cleared(self, sums: Buffer) -> tirx.Stmt:
        return self.each(lambda r, c: store(sums, tirx.const(0.0, DTYPE), r, c))

    def each(self, element: _Element) -> tirx.Stmt:
        """``element(row, column)`` for all of a tile, without a loop: so it lies in registers."""

        def vectors(row: Expr) -> list[tirx.Stmt]:
            def vector(number: Expr) -> list[tirx.Stmt]:
                first = number * integer(self.lanes)
                return [vector_loop(self.lanes, lambda lane: [element(row, first + lane)])]

            return [loop(_VECTORS, vector, tirx.ForKind.UNROLLED)]

        return loop(self.height, vectors, tirx.ForKind.UNROLLED)


class Tiles:
    """Tiles of a product of elements ``left(row, k)`` and the rows of ``right``."""

    def __init__(
        self, machine: Machine, depth: int, left: Callable[[Expr, Expr], Expr], right: Matrix
    ) -> None:
        self.depth, self.left, self.right = depth, left, right
        self.cores, self.shape = machine.cores, Tile(height_of(machine), machine.lanes)
        self.height, self.width, self.each = self.shape.height, self.shape.width, self.shape.each

    def loops(self, rows: int, columns: int, write: Write) -> tirx.Stmt:
        """Panels of columns, each cut into parts of its rows where there are few."""
        panels, tiles = -(-columns // self.width), -(-rows // self.height)
        tiles_of_part = -(-tiles // min(tiles, -(-PARTS * self.cores // panels)))
        parts = -(-tiles // tiles_of_part)

        def part(number: Expr) -> list[tirx.Stmt]:
            column = start_of(number // integer(parts), self.width, columns)
            first = number % integer(parts) * integer(tiles_of_part)

            def tile(i: Expr) -> list[tirx.Stmt]:
                return self.tile(start_of(first + i, self.height, rows), column, write)

            return [loop(tiles_of_part, tile)]

        return loop(panels * parts, part, kind_of(self.cores))

    def tile(self, row: Expr, column: Expr, write: Write) -> list[tirx.Stmt]:
        sums, room = self.shape.registers("sums")
        if self.depth <= _BLOCK:
            added = self._added(sums, row, column, integer(0), self.depth)
            return [room, *added, *write(sums, row, column)]
        total, more = self.shape.registers("total")

        def block(start: Expr, length: int) -> list[tirx.Stmt]:
            def add(r: Expr, c: Expr) -> tirx.Stmt:
                return store(total, load(total, r, c) + load(sums, r, c), r, c)

            return [*self._added(sums, row, column, start, length), self.each(add)]

        whole, rest = divmod(self.depth, _BLOCK)
        return [
            room,
            more,
            self.shape.cleared(total),
            loop(whole, lambda b: block(b * integer(_BLOCK), _BLOCK)),
            *(block(integer(whole * _BLOCK), rest) if rest else []),
            *write(total, row, column),
        ]

    def _added(
        self, sums: Buffer, row: Expr, column: Expr, start: Expr, length: int
    ) -> list[tirx.Stmt]:
        """The sums of a tile over ``length`` of the depth."""

        def terms(i: Expr) -> list[Callable[[Expr, Expr], Expr]]:
            k = start + i
            return [lambda r, c: self.left(row + r, k) * self.right.at(k, column + c)]

        return self.shape.summed(sums, length, terms)


def kind_of(cores: int) -> tirx.ForKind:
    return tirx.ForKind.PARALLEL if cores > 1 else tirx.ForKind.SERIAL


def start_of(number: Expr, size: int, extent: int) -> Expr:
    """Where a tile begins; the last ones overlap, and find the same there."""
    return tirx.Min(number * integer(size), integer(extent - size))
