"""Generate CPU loops for reductions down columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.core.decisions import Rule, decided, fitting, sizes_vary
from tvmbridge.schedules.indexing import index_var, integer
from tvmbridge.schedules.kernel import KernelStage
from tvmbridge.schedules.loops import (
    allocate,
    element_loop,
    less,
    load,
    loop,
    over_vectors,
    power_of_two_below,
    store,
    vector_loop,
)
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.reader import Buffer
from tvmbridge.schedules.reductions import ReductionEmitter, ReductionNest, loop_of_tasks
from tvmbridge.schedules.values import Evaluator, Lane, Memory

# Columns that one task reduces at a time, so that its accumulators stay in the first-level cache.
_BLOCK = 2048
# Steps that are combined before the accumulator is updated, unless their code is long.
_UNROLL = 4
_UNROLL_COST = 40


def emit_columns(nest: ReductionNest, machine: Machine, memory: Memory) -> list[tirx.Stmt]:
    """Return the statements of a reduction down columns."""
    e = ReductionEmitter(nest, machine, memory)
    stage, rows, columns, depth = nest.stage, nest.rows, nest.columns, nest.stage.depth
    block = fitting(lambda n: min(n, _BLOCK), columns)
    blocks = -(-columns // block)
    count = integer(blocks)
    if sizes_vary():
        # Not `rounded_up`, which asks at each sample size alone, where the block is all columns.
        whole = tirx.Add(integer(columns), integer(block - 1))
        count = tirx.FloorDiv(whole, integer(block))
    parts = e.parts(rows * blocks, depth)
    lanes = power_of_two_below(min(machine.lanes, block)) if e.vectorizable else 1
    # Decided even if there is one part, because there may be several at other sizes.
    across = fitting(lambda n: power_of_two_below(min(lanes, n)), rows * columns)
    partial, room = allocate([parts * rows * columns], stage.dtype, f"{stage.name}_parts")

    def put(offset: Expr, value: Expr) -> tirx.Stmt:
        if parts == 1:
            return memory.store(stage.buffer, offset, value)
        return store(partial, value, offset)

    def task(t: Expr) -> list[tirx.Stmt]:
        bound, (row, number, part) = _places(e, t, count, parts)
        first = e.index(columns - block + 1, "first")
        start, end = (integer(depth) * p // integer(parts) for p in (part, part + integer(1)))
        accumulator, allocation = allocate([block], stage.dtype, f"{stage.name}_sums")
        origin = (part * integer(rows) + row) * integer(columns) + first

        def clear(base: Expr, _: Expr | None) -> list[tirx.Stmt]:
            init = e.reduction.init
            return [vector_loop(lanes, lambda lane: [store(accumulator, init, base + lane)])]

        def write(base: Expr, _: Expr | None) -> list[tirx.Stmt]:
            def one(lane: Expr) -> list[tirx.Stmt]:
                return [put(origin + base + lane, load(accumulator, base + lane))]

            return [vector_loop(lanes, one)]

        return [
            *bound,
            allocation,
            tirx.Bind(first, tirx.Min(number * integer(block), less(columns, block))),
            over_vectors(block, lanes, clear),
            *_Block(e, accumulator, lanes, row, first, block).add_steps(start, end),
            over_vectors(block, lanes, write),
        ]

    extent = tirx.Mul(integer(rows * parts), count) if sizes_vary() else None
    all_tasks = loop_of_tasks(e, rows * blocks * parts, task, extent)
    if parts == 1:
        return [all_tasks]
    return [room, all_tasks, *combine_parts(stage, partial, parts, across, memory, e.evaluator)]


def _places(
    e: ReductionEmitter, task: Expr, blocks: Expr, parts: int
) -> tuple[list[tirx.Stmt], list[Expr]]:
    """Return the row, the block and the part of a task, and the statements that bind them.

    Code for any size binds them to variables, which are not simplified further: with one block, the
    number of a task is its row, and the code would differ from that for several blocks.
    """
    each = integer(parts)
    if not sizes_vary():
        values = task // (blocks * each), task // each % blocks, task % each
        return [], [e.indexer.simplify(value) for value in values]
    beside = tirx.FloorDiv(task, each)
    row, block = e.index(e.nest.rows, "row"), index_var("block")
    bound = [
        tirx.Bind(row, tirx.FloorDiv(beside, blocks)),
        tirx.Bind(block, tirx.FloorMod(beside, blocks)),
    ]
    if parts == 1:
        return bound, [row, block, integer(0)]
    part = e.index(parts, "part")
    return [*bound, tirx.Bind(part, tirx.FloorMod(task, each))], [row, block, part]


@dataclass(frozen=True)
class _Block:
    """The accumulators of a block of columns in one row of the result.

    - ``emitter``: the emitter of the reduction.
    - ``sums``: the buffer of the accumulators.
    - ``lanes``: the number of vector lanes.
    - ``row``: the row of the result.
    - ``first``: the first column of the block.
    - ``width``: the number of columns.
    """

    emitter: ReductionEmitter
    sums: Buffer
    lanes: int
    row: Expr
    first: Expr
    width: int

    def add(self, depth: Expr, count: int) -> tirx.Stmt:
        """Return the loop that adds ``count`` elements of each column, from ``depth`` on."""
        return over_vectors(self.width, self.lanes, lambda b, f: self._vector(depth, count, b, f))

    def _vector(self, depth: Expr, count: int, base: Expr, fresh: Expr | None) -> list[tirx.Stmt]:
        e = self.emitter
        if isinstance(base, tirx.Var):
            e.indexer.bind(base, self.width - self.lanes + 1)

        def body(evaluator: Evaluator, lane: Expr) -> None:
            if isinstance(lane, tirx.Var):
                e.indexer.bind(lane, self.lanes)
            at = e.indexer.simplify(base + lane)
            old = evaluator.name(load(self.sums, at), "old")
            values = [
                e.element(evaluator, self.row, depth + integer(i), self.first + at)
                for i in range(count)
            ]
            while len(values) > 1:
                pairs = zip(values[::2], values[1::2], strict=True)
                values = [e.reduction.combine(a, b) for a, b in pairs]
            new = e.reduction.combine(old, values[0])
            if fresh is not None:
                new = tirx.Select(at >= fresh, new, old)
            evaluator.statements.append(store(self.sums, new, at))

        return element_loop(self.lanes, e.evaluator, body)

    def add_steps(self, start: Expr, end: Expr) -> list[tirx.Stmt]:
        """Return the loops that add the elements [start, end) of each column."""
        e = self.emitter

        def step(depth: Expr) -> list[tirx.Stmt]:
            if isinstance(depth, tirx.Var):
                e.indexer.bind(depth, e.stage.depth)
            return [self.add(depth, 1)]

        is_short = decided(Rule.MOST, lambda: e.stage.depth < _UNROLL)
        if e.cost >= _UNROLL_COST or is_short:
            return [loop(end - start, step, start=start)]
        whole = (end - start) // integer(_UNROLL)
        if sizes_vary():
            whole = tirx.FloorDiv(end - start, integer(_UNROLL))

        def several(i: Expr) -> list[tirx.Stmt]:
            depth = e.index(max(e.stage.depth - _UNROLL + 1, 2), "depth")
            return [tirx.Bind(depth, start + i * integer(_UNROLL)), self.add(depth, _UNROLL)]

        rest = start + whole * integer(_UNROLL)
        return [loop(whole, several), loop(end - rest, step, start=rest)]


def combine_parts(
    stage: KernelStage,
    partial: Buffer,
    parts: int,
    lanes: int,
    memory: Memory,
    fork: Callable[[Lane], Evaluator],
) -> list[tirx.Stmt]:
    """Return the loop that combines the parts of every element of the result, as a binary tree.

    A tree has fewer rounding errors for each part than a sum of one part after the other.
    """
    assert stage.reduction is not None
    size, combine = stage.size, stage.reduction.combine

    def vectors(base: Expr, _: Expr | None) -> list[tirx.Stmt]:
        def body(evaluator: Evaluator, lane: Expr) -> None:
            def combined(first: int, last: int) -> Expr:
                if last - first == 1:
                    return load(partial, integer(first * size) + base + lane)
                middle = (first + last) // 2
                halves = combined(first, middle), combined(middle, last)
                return evaluator.name(combine(*halves), "total")

            total = combined(0, parts)
            evaluator.statements.append(memory.store(stage.buffer, base + lane, total))

        return element_loop(lanes, fork, body)

    return [over_vectors(size, lanes, vectors)]
