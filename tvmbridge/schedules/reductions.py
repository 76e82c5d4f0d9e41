"""Reductions that rows cannot hold: down columns, and of long rows (to a scalar, say).

Both go in two steps. Tasks run in parallel, each over a part of what is reduced, with partial results
in vector lanes; then the tasks' results are combined, one after the other, always in the same order. Many
short sums also lose less precision than one long one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.schedules.kernel import Buffer, Kernel, Reduction, Stage
from tvmbridge.schedules.loops import (
    allocate,
    combine_lanes,
    load,
    loop,
    over_vectors,
    power_of_two_below,
    store,
    vector_loop,
)
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.rows import Member, extent_of, virtual_stages
from tvmbridge.schedules.values import (
    Evaluator,
    Indexer,
    Memory,
    index_var,
    integer,
    reads,
    unravel,
)

# Columns that one task sums at a time: its accumulators stay in the first-level cache.
_BLOCK = 2048
# Elements added to one accumulator before it is combined with others.
_LONGEST = 1024
# Steps of a reduction down columns that are combined before the accumulator is touched.
_UNROLL = 4
_UNROLL_COST = 40


@dataclass
class ReductionNest:
    """One reduction: of ``rows`` x ``depth`` x ``columns`` elements over the depth.

    ``columns`` is 1 for a reduction along rows.
    """

    kernel: Kernel
    stored: set[Any]
    stage: Stage
    rows: int
    columns: int
    members: list[Member] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.members = [Member(self.stage, self.stage.depth, 0)]

    def add(self, stage: Stage) -> bool:
        """No other stage joins."""
        return False


def columns_of(kernel: Kernel, stored: set[Any], stage: Stage) -> int | None:
    """Return how many columns lie side by side in memory if ``stage`` reduces down columns, else None."""
    indexer = Indexer({axis.var: axis.extent for axis in stage.axes})
    at = {axis.var: axis.var for axis in stage.axes}
    wide = [axis for axis in stage.axes if axis.extent > 1]
    reduced = [axis for axis in wide if axis.reduce]
    spatial = [axis for axis in wide if not axis.reduce]
    if not reduced or not spatial:
        return None
    flats = [indexer.flat(b, i) for _, b, i in reads(kernel, stored, indexer, stage, at)]
    if any(indexer.coefficient(flat, reduced[-1].var) == 1 for flat in flats):
        return None
    if not any(indexer.coefficient(flat, spatial[-1].var) == 1 for flat in flats):
        return None
    return _smooth_columns(kernel, stored, stage)


def _smooth_columns(kernel: Kernel, stored: set[Any], stage: Stage) -> int | None:
    row, column = index_var("row"), index_var("column")
    for cut in range(len(stage.spatial)):
        outer, inner = stage.spatial[:cut], stage.spatial[cut:]
        ranges = {row: extent_of(outer), column: extent_of(inner)}
        indexer = Indexer(ranges | {axis.var: axis.extent for axis in stage.reduced})
        at = unravel(row, outer, indexer) | unravel(column, inner, indexer)
        at |= {axis.var: axis.var for axis in stage.reduced}
        flats = [indexer.flat(b, i) for _, b, i in reads(kernel, stored, indexer, stage, at)]
        if all(indexer.coefficient(flat, column) in (0, 1) for flat in flats):
            return extent_of(inner)
    return None


class ReductionEmitter:
    """Writes one :class:`ReductionNest`."""

    def __init__(self, nest: ReductionNest, machine: Machine, memory: Memory) -> None:
        self.nest, self.machine, self.memory = nest, machine, memory
        self.stage = nest.stage
        assert self.stage.reduction is not None
        self.reduction: Reduction = self.stage.reduction
        self.indexer = Indexer()
        self.outer, self.inner = _split_by_columns(self.stage, nest.columns)
        virtual = virtual_stages(nest.kernel, nest.stored, self.stage)
        self.cost = sum(stage.cost for stage in virtual)
        self.vectorizable = all(stage.vectorizable for stage in virtual)

    def evaluator(self) -> Evaluator:
        """Return an evaluator that knows nothing yet."""
        return Evaluator(self.nest.kernel, self.nest.stored, self.indexer, self.memory)

    def element(self, evaluator: Evaluator, row: Expr, depth: Expr, column: Expr) -> Expr:
        """Return the element that is reduced, named."""
        at = unravel(row, self.outer, self.indexer) | unravel(column, self.inner, self.indexer)
        at |= unravel(depth, self.stage.reduced, self.indexer)
        return evaluator.name(evaluator.element(self.stage, at), "element")

    def parts(self, tasks: int, steps: int) -> int:
        """Return into how many parts to cut ``steps`` steps that ``tasks`` tasks each go through."""
        nest = self.nest
        work = nest.rows * nest.columns * self.stage.depth * (self.cost + 8)
        wanted = -(-self.machine.chunks(work, 1 << 30) // tasks)
        return max(1, min(wanted, steps // 16), -(-steps // _LONGEST))

    def index(self, limit: int, name: str) -> tirx.Var:
        """Return a fresh variable known to lie in [0, limit)."""
        var = index_var(name)
        self.indexer.bind(var, limit)
        return var


def _split_by_columns(stage: Stage, columns: int) -> tuple[Any, Any]:
    for cut in range(len(stage.spatial) + 1):
        if extent_of(stage.spatial[cut:]) == columns:
            return stage.spatial[:cut], stage.spatial[cut:]
    raise ValueError(f"{stage.name} has no {columns} trailing columns")


def emit_columns(nest: ReductionNest, machine: Machine, memory: Memory) -> list[tirx.Stmt]:
    """Return the code of a reduction down columns."""
    e = ReductionEmitter(nest, machine, memory)
    stage, rows, columns, depth = nest.stage, nest.rows, nest.columns, nest.stage.depth
    block = min(columns, _BLOCK)
    blocks = -(-columns // block)
    parts = e.parts(rows * blocks, depth)
    lanes = power_of_two_below(min(machine.lanes, block)) if e.vectorizable else 1
    partial, room = allocate([parts * rows * columns], stage.dtype, f"{stage.name}_parts")

    def put(offset: Expr, value: Expr) -> tirx.Stmt:
        if parts == 1:
            return memory.store(stage.buffer, offset, value)
        return store(partial, value, offset)

    def task(t: Expr) -> list[tirx.Stmt]:
        row = e.indexer.simplify(t // integer(blocks * parts))
        part = e.indexer.simplify(t % integer(parts))
        number = e.indexer.simplify(t // integer(parts) % integer(blocks))
        first = e.index(columns - block + 1, "first")
        start, end = (integer(depth) * p // integer(parts) for p in (part, part + integer(1)))
        accumulator, allocation = allocate([block], stage.dtype, f"{stage.name}_sums")
        origin = (part * integer(rows) + row) * integer(columns) + first

        def clear(base: Expr, _: Expr | None) -> tirx.Stmt:
            init = e.reduction.init
            return vector_loop(lanes, lambda lane: [store(accumulator, init, base + lane)])

        def write(base: Expr, _: Expr | None) -> tirx.Stmt:
            return vector_loop(
                lanes,
                lambda lane: [put(origin + base + lane, load(accumulator, base + lane))],
            )

        return [
            allocation,
            tirx.Bind(first, tirx.Min(number * integer(block), integer(columns - block))),
            over_vectors(block, lanes, clear),
            *_accumulate(e, accumulator, lanes, (row, first, block), (start, end)),
            over_vectors(block, lanes, write),
        ]

    tasks = rows * blocks * parts
    bound = loop_of_tasks(e, tasks, task)
    if parts == 1:
        return [bound]
    return [room, bound, *_combine_parts(e, partial, parts, lanes)]


def loop_of_tasks(e: ReductionEmitter, tasks: int, task: Any) -> tirx.Stmt:
    """Return a loop over tasks, parallel if there is enough work."""
    nest = e.nest
    work = nest.rows * nest.columns * e.stage.depth * (e.cost + 8)
    parallel = e.machine.chunks(work, tasks) > 1

    def body(t: Expr) -> list[tirx.Stmt]:
        if isinstance(t, tirx.Var):
            e.indexer.bind(t, tasks)
        return task(t)

    return loop(tasks, body, tirx.ForKind.PARALLEL if parallel else tirx.ForKind.SERIAL)


def _accumulate(
    e: ReductionEmitter,
    accumulator: Buffer,
    lanes: int,
    where: tuple[Expr, Expr, int],
    steps: tuple[Expr, Expr],
) -> list[tirx.Stmt]:
    """Return loops that add steps [start, end) of one row and block of columns to its accumulators."""
    row, first, block = where
    start, end = steps
    unroll = _UNROLL if e.cost < _UNROLL_COST else 1

    def add(depth: Expr, count: int) -> tirx.Stmt:
        def vectors(base: Expr, fresh: Expr | None) -> tirx.Stmt:
            if isinstance(base, tirx.Var):
                e.indexer.bind(base, block - lanes + 1)

            def body(lane: Expr) -> list[tirx.Stmt]:
                if isinstance(lane, tirx.Var):
                    e.indexer.bind(lane, lanes)
                evaluator = e.evaluator()
                at = e.indexer.simplify(base + lane)
                old = evaluator.name(load(accumulator, at), "old")
                elements = [
                    e.element(evaluator, row, depth + integer(i), first + at) for i in range(count)
                ]
                while len(elements) > 1:
                    elements = [
                        e.reduction.combine(*elements[i : i + 2])
                        for i in range(0, len(elements), 2)
                    ]
                new = e.reduction.combine(old, elements[0])
                if fresh is not None:
                    new = tirx.Select(at >= fresh, new, old)
                return [*evaluator.statements, store(accumulator, new, at)]

            return vector_loop(lanes, body)

        return over_vectors(block, lanes, vectors)

    def step(depth: Expr) -> list[tirx.Stmt]:
        if isinstance(depth, tirx.Var):
            e.indexer.bind(depth, e.stage.depth)
        return [add(depth, 1)]

    if unroll == 1:
        return [loop(end - start, step, start=start)]
    whole = (end - start) // integer(unroll)

    def several(i: Expr) -> list[tirx.Stmt]:
        depth = e.index(e.stage.depth - unroll + 1, "depth")
        return [tirx.Bind(depth, start + i * integer(unroll)), add(depth, unroll)]

    rest = start + whole * integer(unroll)
    return [loop(whole, several), loop(end - rest, step, start=rest)]


def _combine_parts(
    e: ReductionEmitter, partial: Buffer, parts: int, lanes: int
) -> list[tirx.Stmt]:
    """Return the loop that combines the parts of every element of the result, in order."""
    size = e.stage.size
    lanes = power_of_two_below(min(lanes, size))
    out = e.stage.buffer

    def vectors(base: Expr, _: Expr | None) -> tirx.Stmt:
        def body(lane: Expr) -> list[tirx.Stmt]:
            evaluator = e.evaluator()
            total: Expr = load(partial, base + lane)
            for part in range(1, parts):
                other = load(partial, integer(part * size) + base + lane)
                total = evaluator.name(e.reduction.combine(total, other), "total")
            return [*evaluator.statements, e.memory.store(out, base + lane, total)]

        return vector_loop(lanes, body)

    return [over_vectors(size, lanes, vectors)]


def emit_long_rows(nest: ReductionNest, machine: Machine, memory: Memory) -> list[tirx.Stmt]:
    """Return the code of a reduction of few, long rows."""
    e = ReductionEmitter(nest, machine, memory)
    stage, rows, depth = nest.stage, nest.rows, nest.stage.depth
    lanes = power_of_two_below(min(machine.lanes * 4, depth)) if e.vectorizable else 1
    steps = depth // lanes
    parts = e.parts(rows, steps)
    partial, room = allocate([parts * rows], stage.dtype, f"{stage.name}_parts")

    def task(t: Expr) -> list[tirx.Stmt]:
        row, part = (e.indexer.simplify(i) for i in (t // integer(parts), t % integer(parts)))
        start, end = (integer(steps) * p // integer(parts) for p in (part, part + integer(1)))
        accumulator, allocation = allocate([lanes], stage.dtype, f"{stage.name}_lanes")
        init = e.reduction.init

        def step(i: Expr) -> list[tirx.Stmt]:
            if isinstance(i, tirx.Var):
                e.indexer.bind(i, steps)

            def body(lane: Expr) -> list[tirx.Stmt]:
                if isinstance(lane, tirx.Var):
                    e.indexer.bind(lane, lanes)
                evaluator = e.evaluator()
                old = evaluator.name(load(accumulator, lane), "old")
                at = e.indexer.simplify(i * integer(lanes) + lane)
                element = e.element(evaluator, row, at, integer(0))
                new = e.reduction.combine(old, element)
                return [*evaluator.statements, store(accumulator, new, lane)]

            return [vector_loop(lanes, body)]

        return [
            allocation,
            vector_loop(lanes, lambda lane: [store(accumulator, init, lane)]),
            loop(end - start, step, start=start),
            *combine_lanes(accumulator, lanes, e.reduction),
            store(partial, load(accumulator, integer(0)), part * integer(rows) + row),
        ]

    last = loop(rows, lambda row: _finish_row(e, partial, parts, row, steps * lanes))
    return [room, loop_of_tasks(e, rows * parts, task), last]


def _finish_row(
    e: ReductionEmitter, partial: Buffer, parts: int, row: Expr, done: int
) -> list[tirx.Stmt]:
    """Combine the parts of a row, and the elements from ``done`` on that fill no vector."""
    if isinstance(row, tirx.Var):
        e.indexer.bind(row, e.nest.rows)
    memory, out, rows = e.memory, e.stage.buffer, integer(e.nest.rows)

    def merge(part: Expr) -> list[tirx.Stmt]:
        other = load(partial, (part + integer(1)) * rows + row)
        return [memory.store(out, row, e.reduction.combine(memory.load(out, row), other))]

    def rest(i: Expr) -> list[tirx.Stmt]:
        evaluator = e.evaluator()
        element = e.element(evaluator, row, i + integer(done), integer(0))
        value = e.reduction.combine(memory.load(out, row), element)
        return [*evaluator.statements, memory.store(out, row, value)]

    statements = [memory.store(out, row, load(partial, row))]
    if parts > 1:
        statements.append(loop(parts - 1, merge))
    if done < e.stage.depth:
        statements.append(loop(e.stage.depth - done, rest))
    return statements
