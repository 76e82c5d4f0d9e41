"""GPU kernels of reductions that do not run row by row: down columns, and along few long rows.

Both have two steps: blocks reduce parts, and a second kernel combines the parts in order.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.schedules.gpu.elementwise import over_elements
from tvmbridge.schedules.gpu.threads import WARP, Team, allocate_in, barrier, launch, when
from tvmbridge.schedules.gpu.vectors import side_by_side
from tvmbridge.schedules.indexing import Indexer, index_var, integer, unravel
from tvmbridge.schedules.loops import load, loop, store
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.reader import Buffer
from tvmbridge.schedules.reductions import ReductionEmitter, ReductionNest
from tvmbridge.schedules.values import Evaluator, Lane, Memory

_LONG_TEAM = 512
_HEIGHT = 16
_FIRST = integer(0)
_LANE = Lane(_FIRST, 1)
# Columns of a thread if there are at least `_MANY` elements, and blocks for each multiprocessor.
_LANES, _MANY, _FILLING = 4, 1 << 21, 2


class _Parts:
    """The destination of the blocks' results: the final result, or parts that are combined later.

    - ``e``: the emitter of the reduction.
    - ``count``: the number of parts; with 1, blocks write the final result.
    - ``total``: the number of elements of the result.
    - ``buffer``: the buffer of the parts.
    """

    def __init__(self, e: ReductionEmitter, count: int) -> None:
        self.e, self.count = e, count
        self.total = e.nest.rows * e.nest.columns
        shape = [integer(count * self.total)]
        self.buffer = tirx.decl_buffer(shape, e.stage.dtype, f"{e.stage.name}_parts")

    def put(self, part: Expr, position: Expr, value: Expr) -> list[tirx.Stmt]:
        """Return the statements that store ``value`` of ``part`` for the result at ``position``."""
        if self.count == 1:
            return self._final(position, value, self.e.indexer)
        return [store(self.buffer, value, part * integer(self.total) + position)]

    def _final(self, position: Expr, value: Expr, indexer: Indexer) -> list[tirx.Stmt]:
        """Return the statements that store a result, or the value of the reduction's tail."""
        nest, memory = self.e.nest, self.e.memory
        if nest.tail is None:
            return [memory.store(nest.stage.buffer, position, value)]
        evaluator = Evaluator(nest.kernel, nest.stored, indexer, memory)
        named = evaluator.name(value, nest.stage.name)
        evaluator.places[nest.stage.buffer] = lambda _: named
        place = index_var("place")
        indexer.bind(place, self.total)
        evaluator.statements.append(tirx.Bind(place, position))
        at = unravel(place, nest.tail.spatial, indexer)
        result = evaluator.name(evaluator.element(nest.tail, at), nest.tail.name)
        evaluator.store(nest.tail.buffer, place, result)
        return evaluator.take()

    def around(self, kernel: tirx.Stmt) -> list[tirx.Stmt]:
        """Return ``kernel``, and then the kernel that combines the parts if there are several."""
        if self.count == 1:
            return [kernel]
        e, indexer = self.e, Indexer()

        def element(position: Expr) -> list[tirx.Stmt]:
            total, room = allocate_in("local", 1, e.stage.dtype, "total")

            def add(part: Expr) -> list[tirx.Stmt]:
                other = load(self.buffer, part * integer(self.total) + position)
                return [accumulate(total, e, other)]

            begin = store(total, e.reduction.init, integer(0))
            end = self._final(position, load(total, integer(0)), indexer)
            return [room, begin, loop(self.count, add), *end]

        room = tirx.AllocBuffer(self.buffer)
        return [room, kernel, over_elements(indexer, self.total, element)]


def accumulate(total: Buffer, e: ReductionEmitter, value: Expr, at: Expr = _FIRST) -> tirx.Stmt:
    """Return the statement that combines ``value`` into ``total[at]``."""
    return store(total, e.reduction.combine(load(total, at), value), at)


def emit_gpu_reduction(nest: ReductionNest, machine: Machine, memory: Memory) -> list[tirx.Stmt]:
    """Return the kernels of a reduction down columns or along few, long rows."""
    e = ReductionEmitter(nest, machine, memory)
    return _down_columns(e) if nest.columns > 1 else _along_rows(e)


def _down_columns(e: ReductionEmitter) -> list[tirx.Stmt]:
    nest, depth = e.nest, e.stage.depth
    lanes = _columns_of_thread(e)
    width = WARP * lanes
    tiles = -(-nest.columns // width)
    wanted = max(1, -(-_FILLING * e.machine.cores // (nest.rows * tiles)))
    parts = _Parts(e, max(1, min(wanted, depth // (4 * _HEIGHT))))
    stretch = -(-depth // parts.count)

    def body(block: Expr, thread: Expr) -> list[tirx.Stmt]:
        simplify = e.indexer.simplify
        part, rest = simplify(block % integer(parts.count)), simplify(block // integer(parts.count))
        row, tile = simplify(rest // integer(tiles)), simplify(rest % integer(tiles))
        own, height = simplify(thread % integer(WARP)), simplify(thread // integer(WARP))
        group = e.index(-(-nest.columns // lanes), "group")
        at = tile * integer(WARP) + own
        if nest.columns % width:
            at = tirx.Min(at, integer(nest.columns // lanes - 1))
        totals, room = allocate_in("local", lanes, e.stage.dtype, "totals")
        sums, more = allocate_in("shared", width * _HEIGHT, e.stage.dtype, "sums")
        end = tirx.Min(integer(depth), (part + integer(1)) * integer(stretch))
        begin = part * integer(stretch) + height
        columns = group * integer(lanes)
        put = [
            store(sums, load(totals, integer(i)), thread * integer(lanes) + integer(i))
            for i in range(lanes)
        ]
        return [
            tirx.Bind(group, at),
            room,
            more,
            *(store(totals, e.reduction.init, integer(i)) for i in range(lanes)),
            _strided(e, totals, (begin, end), -(-stretch // _HEIGHT), row, columns, lanes=lanes),
            *put,
            barrier(),
            *when(
                None if width == WARP * _HEIGHT else thread < integer(width),
                _over_heights(e, parts, sums, part, row, tile * integer(width), thread, width),
            ),
        ]

    kernel = launch(e.indexer, nest.rows * tiles * parts.count, WARP * _HEIGHT, body)
    return parts.around(kernel)


def _columns_of_thread(e: ReductionEmitter) -> int:
    """Return the number of neighbouring columns of a thread: several if all threads have work."""
    many = e.nest.rows * e.nest.columns * e.stage.depth >= _MANY
    return _LANES if many and e.nest.columns % _LANES == 0 else 1


def _over_heights(
    e: ReductionEmitter,
    parts: _Parts,
    sums: Buffer,
    part: Expr,
    row: Expr,
    first: Expr,
    thread: Expr,
    width: int,
) -> list[tirx.Stmt]:
    """Return the statements that combine the sums of a block for one column, and store the result.

    Args:
        sums: the block's sums in shared memory: ``_HEIGHT`` sums for each of ``width`` columns.
        part: the part of the depth that the block reduces.
        thread: the thread, which combines one column.
    """
    total, room = allocate_in("local", 1, e.stage.dtype, "total")

    def add(i: Expr) -> list[tirx.Stmt]:
        return [accumulate(total, e, load(sums, i * integer(width) + thread))]

    column = first + thread
    inside = None if e.nest.columns % width == 0 else column < integer(e.nest.columns)
    position = row * integer(e.nest.columns) + column
    stored = parts.put(part, position, load(total, integer(0)))
    begin = store(total, e.reduction.init, integer(0))
    return [room, begin, loop(_HEIGHT, add), *when(inside, stored)]


def _strided(
    e: ReductionEmitter,
    total: Buffer,
    span: tuple[Expr, Expr],
    count: int,
    row: Expr,
    column: Expr,
    stride: int = _HEIGHT,
    lanes: int = 1,
) -> tirx.Stmt:
    """Return a loop that adds every ``stride``-th element of [begin, end) in ``lanes`` columns.

    Args:
        total: the buffer with one total for each column.
        span: begin and end of the range of the depth.
        count: the largest number of steps.
    """

    begin, end = span

    def step(i: Expr) -> list[tirx.Stmt]:
        if isinstance(i, tirx.Var):
            e.indexer.bind(i, count)
        depth = e.index(e.stage.depth, "depth")
        at = begin + i * integer(stride)

        def element(position: Expr, lane: Expr) -> list[tirx.Stmt]:
            evaluator = e.evaluator(_LANE)
            value = e.element(evaluator, row, depth, position)
            return [*evaluator.take(), accumulate(total, e, value, lane)]

        if lanes == 1:
            statements = element(column, integer(0))
        else:
            statements = side_by_side(e.indexer, lanes, column, element)
        return when(at < end, [tirx.Bind(depth, at), *statements])

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
            _strided(e, total, (begin, end), count, row, integer(0), _LONG_TEAM),
            *team.all_reduce(total, e.reduction, e.stage.dtype),
            *when(thread.equal(integer(0)), parts.put(part, row, load(total, integer(0)))),
        ]

    return parts.around(launch(e.indexer, nest.rows * parts.count, _LONG_TEAM, body))
