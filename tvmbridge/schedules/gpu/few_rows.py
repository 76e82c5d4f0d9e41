"""A product of few rows with a matrix, x w^T in float32, limited by the time to read the matrix.

Libraries tile such a product for hundreds of rows and leave most of a GPU idle. Here a block has a
few rows of ``w``, and its threads divide the depth. Each thread sums all products of its part in
registers. The sums of the threads are then combined as a binary tree.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.schedules import scheduled_function
from tvmbridge.schedules.gpu.threads import WARP, allocate_in, barrier, exchanged, launch, when
from tvmbridge.schedules.indexing import Indexer, integer
from tvmbridge.schedules.loops import load, loop, store, vector_loop
from tvmbridge.schedules.reader import Buffer

# The most rows of x in a block, and the most sums.
_ROWS = 16
_SUMS = 64
_LANES = 4
_THREADS = 256
MOST_ROWS = 2 * _ROWS


def fits(rows: int, columns: int, depth: int) -> bool:
    """Whether this kernel is to compute a product (rows, depth) by (depth, columns).

    It needs few rows, a depth that is a multiple of the vector width, and a large matrix.
    """
    return rows <= MOST_ROWS and depth % _LANES == 0 and columns * depth >= 1 << 16


def few_row_product(rows: int, columns: int, depth: int) -> tirx.PrimFunc:
    """Return the scheduled TIR function that computes x w^T.

    Its parameters are x (rows, depth), w (columns, depth) and the result (rows, columns).
    """
    x, w = (
        tirx.decl_buffer([integer(n), integer(depth)], "float32", name)
        for n, name in ((rows, "x"), (columns, "w"))
    )
    out = tirx.decl_buffer([integer(rows), integer(columns)], "float32", "out")
    body = _Product(rows, columns, depth, x, w, out).kernel()
    return scheduled_function([x, w, out], body)


class _Product:
    def __init__(
        self, rows: int, columns: int, depth: int, x: Buffer, w: Buffer, out: Buffer
    ) -> None:
        self.rows, self.columns, self.depth = rows, columns, depth
        self.x, self.w, self.out = x, w, out
        self.row_tiles = -(-rows // _ROWS)
        self.high = -(-rows // self.row_tiles)
        self.wide = 4 if self.high > 8 else 8
        # The combination in a warp halves the sums of each lane five times.
        self.sums = max(WARP, 1 << (self.high * self.wide - 1).bit_length())
        self.threads = min(_THREADS, -(-depth // (_LANES * WARP)) * WARP)
        self.indexer = Indexer()

    def kernel(self) -> tirx.Stmt:
        tiles = -(-self.columns // self.wide)
        return launch(self.indexer, tiles * self.row_tiles, self.threads, self._block)

    def _block(self, block: Expr, thread: Expr) -> list[tirx.Stmt]:
        simplify = self.indexer.simplify
        first_row = simplify(block % integer(self.row_tiles)) * integer(self.high)
        first_column = simplify(block // integer(self.row_tiles)) * integer(self.wide)
        sums, room = allocate_in("local", self.sums, "float32", "sums")
        clear = [store(sums, tirx.const(0.0, "float32"), integer(i)) for i in range(self.sums)]
        step = self.threads * _LANES

        def part(i: Expr) -> list[tirx.Stmt]:
            at = i * integer(step) + thread * integer(_LANES)
            inside = None if self.depth % step == 0 else at < integer(self.depth)
            return when(inside, self._products(sums, first_row, first_column, at))

        return [
            room,
            *clear,
            loop(-(-self.depth // step), part),
            *self._combined(sums, thread),
            *self._across_warps(sums, thread, first_row, first_column),
        ]

    def _products(
        self, sums: Buffer, first_row: Expr, first_column: Expr, at: Expr
    ) -> list[tirx.Stmt]:
        """Return the statements that add the products of four neighbouring depths to all sums."""
        w, room = allocate_in("local", self.wide * _LANES, "float32", "w_part")
        x, more = allocate_in("local", _LANES, "float32", "x_part")
        statements = [room, more]
        for n in range(self.wide):
            column = self._at_most(first_column + integer(n), self.columns, self.wide)
            statements.append(_vector(w, n * _LANES, self.w, column, at))
        for m in range(self.high):
            row = self._at_most(first_row + integer(m), self.rows, self.high)
            statements.append(_vector(x, 0, self.x, row, at))
            for n in range(self.wide):
                total = load(sums, integer(m * self.wide + n))
                for k in range(_LANES):
                    total = total + load(x, integer(k)) * load(w, integer(n * _LANES + k))
                statements.append(store(sums, total, integer(m * self.wide + n)))
        return statements

    @staticmethod
    def _at_most(index: Expr, extent: int, tile: int) -> Expr:
        """Return ``index``, limited to the last index; duplicates are computed but not stored."""
        return index if extent % tile == 0 else tirx.Min(index, integer(extent - 1))

    def _combined(self, sums: Buffer, thread: Expr) -> list[tirx.Stmt]:
        """Return the statements that combine the sums of the lanes of a warp.

        At each of five levels a lane keeps one half of its sums and sends the other half to another
        lane. In the end each lane has a few complete sums.
        """
        statements, count = list[tirx.Stmt](), self.sums
        for offset in (16, 8, 4, 2, 1):
            count //= 2
            upper = (thread // integer(offset) % integer(2)).equal(integer(1))
            for i in range(count):
                low, high = load(sums, integer(i)), load(sums, integer(i + count))
                kept, given = tirx.Select(upper, high, low), tirx.Select(upper, low, high)
                total = kept + exchanged(given, "float32", offset)
                statements.append(store(sums, total, integer(i)))
        return statements

    def _across_warps(
        self, sums: Buffer, thread: Expr, first_row: Expr, first_column: Expr
    ) -> list[tirx.Stmt]:
        """Return the statements that add the warps' sums in order, and store the result.

        Each thread stores one element of the result, or more.
        """
        warps, each = self.threads // WARP, self.sums // WARP
        parts, room = allocate_in("shared", warps * self.sums, "float32", "parts")
        # A lane's bits, from the highest, are the halves that it kept, so its sums are contiguous.
        own = thread * integer(each)
        put = [store(parts, load(sums, integer(i)), own + integer(i)) for i in range(each)]
        total, more = allocate_in("local", 1, "float32", "total")

        def element(i: Expr) -> list[tirx.Stmt]:
            number = i * integer(self.threads) + thread
            row, column = number // integer(self.wide), number % integer(self.wide)
            inside = tirx.And(
                row < integer(self.high),
                tirx.And(
                    first_row + row < integer(self.rows),
                    first_column + column < integer(self.columns),
                ),
            )
            result = load(total, integer(0))

            def add(warp: Expr) -> list[tirx.Stmt]:
                other = load(parts, warp * integer(self.sums) + number)
                return [store(total, result + other, integer(0))]

            there = (first_row + row, first_column + column)
            begin = store(total, tirx.const(0.0, "float32"), integer(0))
            return when(inside, [begin, loop(warps, add), store(self.out, result, *there)])

        return [room, more, *put, barrier(), loop(-(-self.sums // self.threads), element)]


def _vector(local: Buffer, start: int, source: Buffer, row: Expr, at: Expr) -> tirx.Stmt:
    """Return a vector load of four neighbouring elements of a row."""

    def one(i: Expr) -> list[tirx.Stmt]:
        return [store(local, load(source, row, at + i), integer(start) + i)]

    return vector_loop(_LANES, one)


__all__ = ["MOST_ROWS", "few_row_product", "fits"]
