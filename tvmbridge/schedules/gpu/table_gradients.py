"""The gradient of rows that were looked up in a small table: rows added up by index, in float.

PyTorch sorts the indices first, in many launches. Here a block has one row of the table and a few
of its columns: its threads read all indices, and add up in registers what belongs to the row. The
order of the sum is always the same.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.schedules import scheduled_function
from tvmbridge.schedules.gpu.elementwise import over_elements
from tvmbridge.schedules.gpu.threads import WARP, allocate_in, barrier, exchanged, launch, when
from tvmbridge.schedules.indexing import Indexer, index_var, integer
from tvmbridge.schedules.loops import load, loop, sequence, store
from tvmbridge.schedules.reader import Buffer

_COLUMNS, _THREADS, _EACH = 16, 256, 4
# Blocks that fill a GPU, and how many indices the blocks together may compare.
_BLOCKS, _MOST_COMPARED = 264, 1 << 27


def fits(rows: int, columns: int, count: int) -> bool:
    """Whether comparing ``count`` indices with each row costs less than sorting them."""
    if min(rows, columns, count) < 1:
        return False
    return rows * (columns // _width(columns)) * count <= _MOST_COMPARED


def table_gradient(
    rows: int, columns: int, count: int, dtype: str, index_dtype: str
) -> tirx.PrimFunc:
    """The scheduled function of values (count, columns), index (count,) and the gradient.

    A negative index counts from the end. One that is out of bounds adds nothing.
    """
    values = tirx.decl_buffer([integer(count), integer(columns)], dtype, "values")
    index = tirx.decl_buffer([integer(count)], index_dtype, "index")
    out = tirx.decl_buffer([integer(rows), integer(columns)], dtype, "out")
    body = sequence(_Gradient(values, index, out).kernels())
    return scheduled_function([values, index, out], body)


def _width(columns: int) -> int:
    """How many columns a block has: a divisor of all."""
    return next(n for n in range(min(columns, _COLUMNS), 0, -1) if columns % n == 0)


class _Gradient:
    def __init__(self, values: Buffer, index: Buffer, out: Buffer) -> None:
        self.values, self.index, self.out = values, index, out
        self.rows, self.columns = (int(n) for n in out.shape)
        self.count, self.dtype = int(index.shape[0]), str(out.dtype)
        self.wide = _width(self.columns)
        self.tiles = self.columns // self.wide
        wanted = -(-_BLOCKS // (self.rows * self.tiles))
        self.parts = max(1, min(wanted, self.count // (_EACH * _THREADS)))
        self.stretch = -(-self.count // self.parts)
        self.indexer = Indexer()

    def kernels(self) -> list[tirx.Stmt]:
        """One kernel; where blocks have a part of the indices each, one that adds these up too."""
        blocks = self.rows * self.tiles * self.parts
        if self.parts == 1:
            return [
                launch(self.indexer, blocks, _THREADS, lambda b, t: self._block(self.out, b, t))
            ]
        shape = [integer(self.parts * self.rows), integer(self.columns)]
        sums = tirx.decl_buffer(shape, self.dtype, "parts")
        kernel = launch(self.indexer, blocks, _THREADS, lambda b, t: self._block(sums, b, t))
        return [tirx.AllocBuffer(sums), kernel, self._over_parts(sums)]

    def _over_parts(self, sums: Buffer) -> tirx.Stmt:
        def element(position: Expr) -> list[tirx.Stmt]:
            row, column = position // integer(self.columns), position % integer(self.columns)
            total, room = allocate_in("local", 1, self.dtype, "total")
            result = load(total, integer(0))

            def add(part: Expr) -> list[tirx.Stmt]:
                other = load(sums, part * integer(self.rows) + row, column)
                return [store(total, result + other, integer(0))]

            begin = store(total, tirx.const(0.0, self.dtype), integer(0))
            return [room, begin, loop(self.parts, add), store(self.out, result, row, column)]

        return over_elements(Indexer(), self.rows * self.columns, element)

    def _block(self, target: Buffer, block: Expr, thread: Expr) -> list[tirx.Stmt]:
        simplify = self.indexer.simplify
        part = simplify(block % integer(self.parts))
        rest = simplify(block // integer(self.parts))
        row = simplify(rest // integer(self.tiles))
        first = simplify(rest % integer(self.tiles)) * integer(self.wide)
        sums, room = allocate_in("local", self.wide, self.dtype, "sums")
        zero = tirx.const(0.0, self.dtype)
        end = tirx.Min(integer(self.count), (part + integer(1)) * integer(self.stretch))

        def step(i: Expr) -> list[tirx.Stmt]:
            at = part * integer(self.stretch) + i * integer(_THREADS) + thread
            place = index_var("place")
            found = tirx.Cast("int64", load(self.index, at))
            own = tirx.Or(place.equal(row), place.equal(row - integer(self.rows)))
            added = [
                store(
                    sums,
                    load(sums, integer(c)) + load(self.values, at, first + integer(c)),
                    integer(c),
                )
                for c in range(self.wide)
            ]
            return when(at < end, [tirx.Bind(place, found), *when(own, added)])

        return [
            room,
            *(store(sums, zero, integer(c)) for c in range(self.wide)),
            loop(-(-self.stretch // _THREADS), step),
            *self._combined(sums, thread, target, part * integer(self.rows) + row, first),
        ]

    def _combined(
        self, sums: Buffer, thread: Expr, target: Buffer, row: Expr, first: Expr
    ) -> list[tirx.Stmt]:
        """The sums of a warp's lanes, then of the warps, by as many threads as columns."""
        statements = []
        for offset in (16, 8, 4, 2, 1):
            for c in range(self.wide):
                mine = load(sums, integer(c))
                total = mine + exchanged(mine, self.dtype, offset)
                statements.append(store(sums, total, integer(c)))
        warps = _THREADS // WARP
        shared, room = allocate_in("shared", warps * self.wide, self.dtype, "warps")
        own = thread // integer(WARP) * integer(self.wide)
        put = [store(shared, load(sums, integer(c)), own + integer(c)) for c in range(self.wide)]
        result, more = allocate_in("local", 1, self.dtype, "result")

        def add(warp: Expr) -> list[tirx.Stmt]:
            other = load(shared, warp * integer(self.wide) + thread)
            return [store(result, load(result, integer(0)) + other, integer(0))]

        begin = store(result, tirx.const(0.0, self.dtype), integer(0))
        end = store(target, load(result, integer(0)), row, first + thread)
        return [
            room,
            more,
            *statements,
            *when((thread % integer(WARP)).equal(integer(0)), put),
            barrier(),
            *when(thread < integer(self.wide), [begin, loop(warps, add), end]),
        ]


__all__ = ["fits", "table_gradient"]
