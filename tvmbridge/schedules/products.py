"""A product of float32 matrices in loops: tiles of the result that lie in registers.

Operands are read where they lie: vectors of the right one's rows, and single elements of the left
one, which may be transposed. So a linear layer's gradients need no copy, its input's (cotangent
times weight) and its weight's (transposed cotangent times input), where libraries bring operands
into an order of their own first. The tiles are those of Goto and van de Geijn, "Anatomy of
High-Performance Matrix Multiplication" (2008), which packs operands as well.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr
from tvm.s_tir import SBlock, SBlockRealize

from tvmbridge.schedules import marked_scheduled
from tvmbridge.schedules.indexing import integer
from tvmbridge.schedules.loops import allocate, load, loop, store, vector_loop
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.reader import Buffer

_DTYPE = "float32"
# Vectors of a tile: as many as hide the latency of a multiplication, and leave registers for
# operands. AVX-512 has 32 registers, AVX2 has 16.
_VECTORS = 2
_HIGH, _LOW = 8, 6
# So many products are added up, and then the sums: that keeps roundings few, as libraries do.
_BLOCK = 256
# Parts of the work for each core, should one be slower than others.
_PARTS = 4

_Element = Callable[[Expr, Expr], tirx.Stmt]


def fits(rows: int, columns: int, machine: Machine) -> bool:
    """Whether a result of this size has room for a tile."""
    return rows >= _height(machine) and columns >= machine.lanes * _VECTORS


def product(
    rows: int, columns: int, depth: int, *, transposed: bool, machine: Machine
) -> tirx.PrimFunc:
    """A function of the operands and the result, which it writes.

    Args:
        rows, columns: of the result, as :func:`fits` says.
        depth: columns of the left operand, rows of the right one.
        transposed: the left operand lies as (depth, rows).
        machine: whose registers and cores are used.
    """
    shape = (depth, rows) if transposed else (rows, depth)
    left, right, out = (
        tirx.decl_buffer([integer(n) for n in s], _DTYPE, name)
        for s, name in ((shape, "left"), ((depth, columns), "right"), ((rows, columns), "out"))
    )
    body = _Product(left, right, out, transposed, machine).loops()
    root = SBlockRealize([], True, SBlock([], [], [], "root", body))
    function = tirx.PrimFunc([left, right, out], root)
    return marked_scheduled(function.with_attrs({"tirx.noalias": True, "s_tir": True}))


def _height(machine: Machine) -> int:
    return _HIGH if machine.lanes >= 16 else _LOW


class _Product:
    def __init__(
        self, left: Buffer, right: Buffer, out: Buffer, transposed: bool, machine: Machine
    ) -> None:
        self.left, self.right, self.out = left, right, out
        self.transposed = transposed
        self.rows, self.columns = (int(n) for n in out.shape)
        self.depth = int(right.shape[0])
        self.lanes, self.cores = machine.lanes, machine.cores
        self.height, self.width = _height(machine), machine.lanes * _VECTORS

    def loops(self) -> tirx.Stmt:
        """Panels of columns, each cut into parts of its rows where there are few."""
        panels, tiles = -(-self.columns // self.width), -(-self.rows // self.height)
        parts = min(tiles, -(-_PARTS * self.cores // panels))
        tiles_of_part = -(-tiles // parts)

        def part(number: Expr) -> list[tirx.Stmt]:
            column = _start(number // integer(parts), self.width, self.columns)
            first = number % integer(parts) * integer(tiles_of_part)

            def tile(i: Expr) -> list[tirx.Stmt]:
                return self._tile(_start(first + i, self.height, self.rows), column)

            return [loop(tiles_of_part, tile)]

        return loop(panels * parts, part, tirx.ForKind.PARALLEL)

    def _tile(self, row: Expr, column: Expr) -> list[tirx.Stmt]:
        sums, room = self._registers("sums")
        if self.depth <= _BLOCK:
            added = self._added(sums, row, column, integer(0), self.depth)
            return [room, *added, self._written(sums, row, column)]
        total, more = self._registers("total")

        def block(start: Expr, length: int) -> list[tirx.Stmt]:
            def add(r: Expr, c: Expr) -> tirx.Stmt:
                return store(total, load(total, r, c) + load(sums, r, c), r, c)

            return [*self._added(sums, row, column, start, length), self._each(add)]

        whole, rest = divmod(self.depth, _BLOCK)
        return [
            room,
            more,
            self._cleared(total),
            loop(whole, lambda b: block(b * integer(_BLOCK), _BLOCK)),
            *(block(integer(whole * _BLOCK), rest) if rest else []),
            self._written(total, row, column),
        ]

    def _added(
        self, sums: Buffer, row: Expr, column: Expr, start: Expr, length: int
    ) -> list[tirx.Stmt]:
        """The sums of a tile over ``length`` of the depth."""

        def step(i: Expr) -> list[tirx.Stmt]:
            k = start + i

            def add(r: Expr, c: Expr) -> tirx.Stmt:
                place = (k, row + r) if self.transposed else (row + r, k)
                term = load(self.left, *place) * load(self.right, k, column + c)
                return store(sums, load(sums, r, c) + term, r, c)

            return [self._each(add)]

        return [self._cleared(sums), loop(length, step)]

    def _written(self, sums: Buffer, row: Expr, column: Expr) -> tirx.Stmt:
        return self._each(lambda r, c: store(self.out, load(sums, r, c), row + r, column + c))

    def _cleared(self, sums: Buffer) -> tirx.Stmt:
        return self._each(lambda r, c: store(sums, tirx.const(0.0, _DTYPE), r, c))

    def _registers(self, name: str) -> tuple[Buffer, tirx.Stmt]:
        return allocate([self.height, self.width], _DTYPE, name)

    def _each(self, element: _Element) -> tirx.Stmt:
        """``element(row, column)`` for all of a tile, without a loop: so it lies in registers."""

        def vectors(row: Expr) -> list[tirx.Stmt]:
            def vector(number: Expr) -> list[tirx.Stmt]:
                first = number * integer(self.lanes)
                return [vector_loop(self.lanes, lambda lane: [element(row, first + lane)])]

            return [loop(_VECTORS, vector, tirx.ForKind.UNROLLED)]

        return loop(self.height, vectors, tirx.ForKind.UNROLLED)


def _start(number: Expr, size: int, extent: int) -> Expr:
    """Where a tile begins; the last one overlaps the one before it, and finds the same there."""
    start = number * integer(size)
    return start if extent % size == 0 else tirx.Min(start, integer(extent - size))
