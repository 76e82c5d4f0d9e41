"""GPU kernels of reductions that rows cannot hold: down columns, and of few, long rows.

Both go in two steps: blocks reduce parts, and a second kernel combines the parts in their order.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.schedules.gpu.elementwise import over_elements
from tvmbridge.schedules.gpu.threads import WARP, Team, allocate_in, barrier, launch, when
from tvmbridge.schedules.indexing import Indexer, integer
from tvmbridge.schedules.loops import load, loop, store
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.reader import Buffer
from tvmbridge.schedules.reductions import ReductionEmitter, ReductionNest
from tvmbridge.schedules.values import Lane, Memory

_LONG_TEAM = 512
_HEIGHT = 16
_LANE = Lane(integer(0), 1)


class _Parts:
    """Where blocks put what they reduced: the result, or parts that are combined after them."""

    def __init__(self, e: ReductionEmitter, count: int) -> None:
        self.e, self.count = e, count
        self.total = e.nest.rows * e.nest.columns
        shape = [integer(count * self.total)]
        self.buffer = tirx.decl_buffer(shape, e.stage.dtype, f"{e.stage.name}_parts")

    def put(self, part: Expr, position: Expr, value: Expr) -> tirx.Stmt:
        """Store what the ``part`` of the result at ``position`` is."""
        if self.count == 1:
            return self.e.memory.store(self.e.stage.buffer, position, value)
        return store(self.buffer, value, part * integer(self.total) + position)

    def around(self, kernel: tirx.Stmt) -> list[tirx.Stmt]:
        """``kernel``, and the one that combines the parts."""
        if self.count == 1:
            return [kernel]
        e, indexer = self.e, Indexer()

        def element(position: Expr) -> list[tirx.Stmt]:
            total, room = allocate_in("local", 1, e.stage.dtype, "total")

            def add(part: Expr) -> list[tirx.Stmt]:
                other = load(self.buffer, part * integer(self.total) + position)
                return [accumulate(total, e, other)]

            begin = store(total, e.reduction.init, integer(0))
            end = e.memory.store(e.stage.buffer, position, load(total, integer(0)))
            return [room, begin, loop(self.count, add), end]

        room = tirx.AllocBuffer(self.buffer)
        return [room, kernel, over_elements(indexer, self.total, element)]


def accumulate(total: Buffer, e: ReductionEmitter, value: Expr) -> tirx.Stmt:
    """Combine ``total[0]`` with ``value``."""
    return store(total, e.reduction.combine(load(total, integer(0)), value), integer(0))


def emit_gpu_reduction(nest: ReductionNest, machine: Machine, memory: Memory) -> list[tirx.Stmt]:
    """The kernels of a reduction down columns or along few, long rows."""
    e = ReductionEmitter(nest, machine, memory)
    return _down_columns(e) if nest.columns > 1 else _along_rows(e)


def _down_columns(e: ReductionEmitter) -> list[tirx.Stmt]:
    nest, depth = e.nest, e.stage.depth
    tiles = -(-nest.columns // WARP)
    wanted = max(1, -(-4 * e.machine.cores // (nest.rows * tiles)))
    parts = _Parts(e, max(1, min(wanted, depth // (4 * _HEIGHT))))
    stretch = -(-depth // parts.count)

    def body(block: Expr, thread: Expr) -> list[tirx.Stmt]:
        simplify = e.indexer.simplify
        part, rest = simplify(block % integer(parts.count)), simplify(block // integer(parts.count))
        row, tile = simplify(rest // integer(tiles)), simplify(rest % integer(tiles))
        lane, height = simplify(thread % integer(WARP)), simplify(thread // integer(WARP))
        column = e.index(nest.columns, "column")
        own = tile * integer(WARP) + lane
        if nest.columns % WARP:
            own = tirx.Min(own, integer(nest.columns - 1))
        total, room = allocate_in("local", 1, e.stage.dtype, "total")
        sums, more = allocate_in("shared", WARP * _HEIGHT, e.stage.dtype, "sums")
        end = tirx.Min(integer(depth), (part + integer(1)) * integer(stretch))
        begin = part * integer(stretch) + height
        return [
            tirx.Bind(column, own),
            room,
            more,
            store(total, e.reduction.init, integer(0)),
            _strided(e, total, begin, end, -(-stretch // _HEIGHT), row, column),
            store(sums, load(total, integer(0)), thread),
            barrier(),
            *when(
                height.equal(integer(0)),
                [
                    store(total, e.reduction.init, integer(0)),
                    loop(
                        _HEIGHT,
                        lambda i: [accumulate(total, e, load(sums, i * integer(WARP) + lane))],
                    ),
                    parts.put(part, row * integer(nest.columns) + column, load(total, integer(0))),
                ],
            ),
        ]

    kernel = launch(e.indexer, nest.rows * tiles * parts.count, WARP * _HEIGHT, body)
    return parts.around(kernel)


def _strided(
    e: ReductionEmitter,
    total: Buffer,
    begin: Expr,
    end: Expr,
    count: int,
    row: Expr,
    column: Expr,
    stride: int = _HEIGHT,
) -> tirx.Stmt:
    """Add every ``stride``-th element from ``begin`` on, below ``end``."""

    def step(i: Expr) -> list[tirx.Stmt]:
        if isinstance(i, tirx.Var):
            e.indexer.bind(i, count)
        depth = e.index(e.stage.depth, "depth")
        at = begin + i * integer(stride)
        evaluator = e.evaluator(_LANE)
        value = e.element(evaluator, row, depth, column)
        return when(
            at < end, [tirx.Bind(depth, at), *evaluator.take(), accumulate(total, e, value)]
        )

    return loop(count, step)


def _along_rows(e: ReductionEmitter) -> list[tirx.Stmt]:
    nest, depth = e.nest, e.stage.depth
    wanted = max(1, -(-2 * e.machine.cores // nest.rows))
    parts = _Parts(e, max(1, min(wanted, depth // (4 * _LONG_TEAM))))
    stretch = -(-depth // parts.count)

    def body(block: Expr, thread: Expr) -> list[tirx.Stmt]:
        simplify = e.indexer.simplify
        part, row = simplify(block % integer(parts.count)), simplify(block // integer(parts.count))
        total, room = allocate_in("local", 1, e.stage.dtype, "total")
        end = tirx.Min(integer(depth), (part + integer(1)) * integer(stretch))
        begin, count = part * integer(stretch) + thread, -(-stretch // _LONG_TEAM)
        team = Team(_LONG_TEAM, thread)
        return [
            room,
            store(total, e.reduction.init, integer(0)),
            _strided(e, total, begin, end, count, row, integer(0), _LONG_TEAM),
            *team.all_reduce(total, e.reduction, e.stage.dtype),
            *when(thread.equal(integer(0)), [parts.put(part, row, load(total, integer(0)))]),
        ]

    return parts.around(launch(e.indexer, nest.rows * parts.count, _LONG_TEAM, body))
