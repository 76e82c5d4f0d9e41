"""A product of float32 matrices in loops: tiles of the result that lie in registers.

Operands are read where they lie: vectors of the right one's rows, and single elements of the left
one, which may be transposed. So a linear layer's gradients need no copy, its input's (cotangent
times weight) and its weight's (transposed cotangent times input), where libraries bring operands
into an order of their own first. The layer itself, input times transposed weight, is computed with
both exchanged: only its few rows are transposed before. The tiles are those of Goto and van de
Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008), which packs operands as well.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr
from tvm.s_tir import SBlock, SBlockRealize

from tvmbridge.kernels.product_form import Form
from tvmbridge.schedules import marked_scheduled
from tvmbridge.schedules.indexing import integer
from tvmbridge.schedules.loops import allocate, load, loop, sequence, store, vector_loop
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

# From this depth on the columns of a transposed operand are copied, in blocks of so many tiles:
# their elements lie in lines of their own, which push one another out of the caches.
_DEEP = 128
_FEWEST, _MOST = 4, 20
# A product of more rows with a transposed matrix spends too long on copying them.
_FEW_ROWS = 128

_Element = Callable[[Expr, Expr], tirx.Stmt]
_Write = Callable[[Buffer, Expr, Expr], list[tirx.Stmt]]


def fits(form: Form, machine: Machine) -> bool:
    """Whether there are loops for this form, and room for a tile in the result."""
    height, width = _height(machine), machine.lanes * _VECTORS
    if not form.right_transposed:
        return form.rows >= height and form.columns >= width
    few = height <= form.rows <= _FEW_ROWS
    return few and not form.left_transposed and form.columns >= height and form.depth >= width


def product(form: Form, machine: Machine) -> tirx.PrimFunc:
    """A function of the operands and the result, which it writes; for what :func:`fits`."""
    left, right, out = (
        tirx.decl_buffer([integer(n) for n in shape], _DTYPE, name)
        for shape, name in zip(form.shapes, ("left", "right", "out"), strict=True)
    )
    if form.right_transposed:
        body = _of_few_rows(form, machine, left, right, out)
    elif form.left_transposed and form.depth >= _DEEP and (block := _block(form.rows, machine)):
        body = _of_copied_rows(form, machine, left, right, out, block)
    else:
        body = _of_matrices(form, machine, left, right, out)
    root = SBlockRealize([], True, SBlock([], [], [], "root", body))
    function = tirx.PrimFunc([left, right, out], root)
    return marked_scheduled(function.with_attrs({"tirx.noalias": True, "s_tir": True}))


def _height(machine: Machine) -> int:
    return _HIGH if machine.lanes >= 16 else _LOW


def _of_matrices(
    form: Form, machine: Machine, left: Buffer, right: Buffer, out: Buffer
) -> tirx.Stmt:
    def left_at(row: Expr, k: Expr) -> Expr:
        return load(left, k, row) if form.left_transposed else load(left, row, k)

    tiles = _Tiles(machine, form.depth, left_at, right)

    def write(sums: Buffer, row: Expr, column: Expr) -> list[tirx.Stmt]:
        return [tiles.each(lambda r, c: store(out, load(sums, r, c), row + r, column + c))]

    return tiles.loops(form.rows, form.columns, write)


def _block(rows: int, machine: Machine) -> int | None:
    """The tiles of a block, of which all cores have as many, with few that overlap; if any."""
    tiles = -(-rows // _height(machine))
    counts = range(machine.cores, tiles + 1, machine.cores)
    found = [(n * -(-tiles // n), n) for n in counts if _FEWEST <= -(-tiles // n) <= _MOST]
    return -(-tiles // min(found)[1]) if found else None


def _of_copied_rows(
    form: Form, machine: Machine, left: Buffer, right: Buffer, out: Buffer, tiles_of_block: int
) -> tirx.Stmt:
    """Blocks of the result's rows, whose part of ``left`` is copied, tile by tile."""
    height, width = _height(machine), machine.lanes * _VECTORS
    rows = tiles_of_block * height
    copy, room = allocate([tiles_of_block, form.depth, height], _DTYPE, "copied")

    def copied(first: Expr) -> tirx.Stmt:
        def tile(k: Expr, t: Expr) -> tirx.Stmt:
            def element(lane: Expr) -> list[tirx.Stmt]:
                row = first + t * integer(height) + lane
                return [store(copy, load(left, k, row), t, k, lane)]

            return vector_loop(height, element)

        return loop(form.depth, lambda k: [loop(tiles_of_block, lambda t: [tile(k, t)])])

    def multiplied(row: Expr, column: Expr, t: Expr) -> list[tirx.Stmt]:
        tiles = _Tiles(machine, form.depth, lambda r, k: load(copy, t, k, r), right)

        def write(sums: Buffer, _: Expr, column: Expr) -> list[tirx.Stmt]:
            return [tiles.each(lambda r, c: store(out, load(sums, r, c), row + r, column + c))]

        return tiles.tile(integer(0), column, write)

    def block(number: Expr) -> list[tirx.Stmt]:
        first = _start(number, rows, form.rows)

        def panel(p: Expr) -> list[tirx.Stmt]:
            column = _start(p, width, form.columns)

            def tile(t: Expr) -> list[tirx.Stmt]:
                return multiplied(first + t * integer(height), column, t)

            return [loop(tiles_of_block, tile)]

        return [room, copied(first), loop(-(-form.columns // width), panel)]

    return loop(-(-form.rows // rows), block, tirx.ForKind.PARALLEL)


def _of_few_rows(
    form: Form, machine: Machine, left: Buffer, right: Buffer, out: Buffer
) -> tirx.Stmt:
    """The transposed product: rows of the weight times the transposed rows, which are copied."""
    width = machine.lanes * _VECTORS
    padded = -(-form.rows // width) * width
    copy, room = allocate([form.depth, padded], _DTYPE, "transposed")
    tiles = _Tiles(machine, form.depth, lambda row, k: load(right, row, k), copy)

    def write(sums: Buffer, row: Expr, column: Expr) -> list[tirx.Stmt]:
        # Registers have no columns: they go through memory.
        tile, more = allocate([tiles.height, tiles.width], _DTYPE, "tile")

        def line(c: Expr) -> list[tirx.Stmt]:
            def element(r: Expr) -> list[tirx.Stmt]:
                return [store(out, load(tile, r, c), column + c, row + r)]

            stored = loop(tiles.height, element, tirx.ForKind.UNROLLED)
            if padded == form.rows:
                return [stored]
            return [tirx.IfThenElse(column + c < integer(form.rows), stored, None)]

        moved = tiles.each(lambda r, c: store(tile, load(sums, r, c), r, c))
        return [more, moved, loop(tiles.width, line)]

    copied = _transposed(left, copy, form.rows, padded, form.depth, machine)
    return sequence([room, copied, tiles.loops(form.columns, padded, write)])


def _transposed(
    rows: Buffer, copy: Buffer, count: int, padded: int, depth: int, machine: Machine
) -> tirx.Stmt:
    """Copy ``rows``, of ``depth`` columns, to columns of ``copy``, and zeros beside them."""
    lanes = machine.lanes

    def some(number: Expr) -> list[tirx.Stmt]:
        first = _start(number, lanes, depth)

        def row(r: Expr) -> list[tirx.Stmt]:
            def element(lane: Expr) -> list[tirx.Stmt]:
                return [store(copy, load(rows, r, first + lane), first + lane, r)]

            return [vector_loop(lanes, element)]

        def none(r: Expr) -> list[tirx.Stmt]:
            zero = tirx.const(0.0, _DTYPE)
            return [loop(lanes, lambda lane: [store(copy, zero, first + lane, integer(count) + r)])]

        return [loop(count, row), *([loop(padded - count, none)] if padded > count else [])]

    return loop(-(-depth // lanes), some, tirx.ForKind.PARALLEL)


class _Tiles:
    """Tiles of a product of elements ``left(row, k)`` and the rows of ``right``."""

    def __init__(
        self, machine: Machine, depth: int, left: Callable[[Expr, Expr], Expr], right: Buffer
    ) -> None:
        self.depth, self.left, self.right = depth, left, right
        self.lanes, self.cores = machine.lanes, machine.cores
        self.height, self.width = _height(machine), machine.lanes * _VECTORS

    def loops(self, rows: int, columns: int, write: _Write) -> tirx.Stmt:
        """Panels of columns, each cut into parts of its rows where there are few."""
        panels, tiles = -(-columns // self.width), -(-rows // self.height)
        tiles_of_part = -(-tiles // min(tiles, -(-_PARTS * self.cores // panels)))
        parts = -(-tiles // tiles_of_part)

        def part(number: Expr) -> list[tirx.Stmt]:
            column = _start(number // integer(parts), self.width, columns)
            first = number % integer(parts) * integer(tiles_of_part)

            def tile(i: Expr) -> list[tirx.Stmt]:
                return self.tile(_start(first + i, self.height, rows), column, write)

            return [loop(tiles_of_part, tile)]

        return loop(panels * parts, part, tirx.ForKind.PARALLEL)

    def tile(self, row: Expr, column: Expr, write: _Write) -> list[tirx.Stmt]:
        sums, room = self._registers("sums")
        if self.depth <= _BLOCK:
            added = self._added(sums, row, column, integer(0), self.depth)
            return [room, *added, *write(sums, row, column)]
        total, more = self._registers("total")

        def block(start: Expr, length: int) -> list[tirx.Stmt]:
            def add(r: Expr, c: Expr) -> tirx.Stmt:
                return store(total, load(total, r, c) + load(sums, r, c), r, c)

            return [*self._added(sums, row, column, start, length), self.each(add)]

        whole, rest = divmod(self.depth, _BLOCK)
        return [
            room,
            more,
            self._cleared(total),
            loop(whole, lambda b: block(b * integer(_BLOCK), _BLOCK)),
            *(block(integer(whole * _BLOCK), rest) if rest else []),
            *write(total, row, column),
        ]

    def _added(
        self, sums: Buffer, row: Expr, column: Expr, start: Expr, length: int
    ) -> list[tirx.Stmt]:
        """The sums of a tile over ``length`` of the depth."""

        def step(i: Expr) -> list[tirx.Stmt]:
            k = start + i

            def add(r: Expr, c: Expr) -> tirx.Stmt:
                term = self.left(row + r, k) * load(self.right, k, column + c)
                return store(sums, load(sums, r, c) + term, r, c)

            return [self.each(add)]

        return [self._cleared(sums), loop(length, step)]

    def _cleared(self, sums: Buffer) -> tirx.Stmt:
        return self.each(lambda r, c: store(sums, tirx.const(0.0, _DTYPE), r, c))

    def _registers(self, name: str) -> tuple[Buffer, tirx.Stmt]:
        return allocate([self.height, self.width], _DTYPE, name)

    def each(self, element: _Element) -> tirx.Stmt:
        """``element(row, column)`` for all of a tile, without a loop: so it lies in registers."""

        def vectors(row: Expr) -> list[tirx.Stmt]:
            def vector(number: Expr) -> list[tirx.Stmt]:
                first = number * integer(self.lanes)
                return [vector_loop(self.lanes, lambda lane: [element(row, first + lane)])]

            return [loop(_VECTORS, vector, tirx.ForKind.UNROLLED)]

        return loop(self.height, vectors, tirx.ForKind.UNROLLED)


def _start(number: Expr, size: int, extent: int) -> Expr:
    """Where a tile begins; the last ones overlap, and find the same there."""
    return tirx.Min(number * integer(size), integer(extent - size))
