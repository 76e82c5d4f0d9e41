"""Generate CPU loops for reductions of few, long rows (for example to a scalar)."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.core.decisions import divides, fitting, sizes_vary
from tvmbridge.schedules.indexing import integer
from tvmbridge.schedules.loops import (
    allocate,
    combine_lanes,
    element_loop,
    load,
    loop,
    loop_over,
    power_of_two_below,
    rounded_down,
    store,
    vector_loop,
)
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.reader import Buffer
from tvmbridge.schedules.reductions import ReductionEmitter, ReductionNest, loop_of_tasks
from tvmbridge.schedules.values import Evaluator, Lane, Memory


def emit_long_rows(nest: ReductionNest, machine: Machine, memory: Memory) -> list[tirx.Stmt]:
    """Return the statements of a reduction of few, long rows."""
    e = ReductionEmitter(nest, machine, memory)
    stage, rows, depth = nest.stage, nest.rows, nest.stage.depth
    widest = machine.lanes * 4 if e.vectorizable else 1
    lanes = fitting(lambda n: power_of_two_below(min(widest, n)), depth)
    parts = e.parts(rows, depth // lanes)
    steps = rounded_down(depth, lanes)
    partial, room = allocate([parts * rows], stage.dtype, f"{stage.name}_parts")

    def task(t: Expr) -> list[tirx.Stmt]:
        row, part = (e.indexer.simplify(i) for i in (t // integer(parts), t % integer(parts)))
        start, end = (steps * p // integer(parts) for p in (part, part + integer(1)))
        accumulator, allocation = allocate([lanes], stage.dtype, f"{stage.name}_lanes")
        init = e.reduction.init

        def step(i: Expr) -> list[tirx.Stmt]:
            if isinstance(i, tirx.Var):
                e.indexer.bind(i, depth // lanes)

            def body(evaluator: Evaluator, lane: Expr) -> None:
                if isinstance(lane, tirx.Var):
                    e.indexer.bind(lane, lanes)
                old = evaluator.name(load(accumulator, lane), "old")
                at = e.indexer.simplify(i * integer(lanes) + lane)
                element = e.element(evaluator, row, at, integer(0))
                new = e.reduction.combine(old, element)
                evaluator.statements.append(store(accumulator, new, lane))

            return element_loop(lanes, e.evaluator, body)

        return [
            allocation,
            vector_loop(lanes, lambda lane: [store(accumulator, init, lane)]),
            loop(end - start, step, start=start),
            *combine_lanes(accumulator, lanes, e.reduction),
            store(partial, load(accumulator, integer(0)), part * integer(rows) + row),
        ]

    last = loop_over(rows, lambda row: _finish_row(e, partial, parts, row, lanes))
    return [room, loop_of_tasks(e, rows * parts, task), last]


def _finish_row(
    e: ReductionEmitter, partial: Buffer, parts: int, row: Expr, lanes: int
) -> list[tirx.Stmt]:
    """Return the statements that combine the parts of a row with its last elements.

    The last elements are those that do not fill a vector of ``lanes``. The statements combine
    them before they combine the parts: an addition to a long row's sum rounds to its precision.
    """
    if isinstance(row, tirx.Var):
        e.indexer.bind(row, e.nest.rows)
    memory, out, rows = e.memory, e.stage.buffer, integer(e.nest.rows)

    def merge(part: Expr) -> list[tirx.Stmt]:
        other = load(partial, part * rows + row)
        return [memory.store(out, row, e.reduction.combine(memory.load(out, row), other))]

    depth = e.stage.depth
    done = rounded_down(depth, lanes) * integer(lanes)

    def rest(i: Expr) -> list[tirx.Stmt]:
        # The loop begins at `done`: TVM would simplify a sum with it by the number of one size.
        if isinstance(i, tirx.Var):
            e.indexer.bind(i, depth)
        evaluator = e.evaluator(Lane(integer(0), 1))
        element = e.element(evaluator, row, i, integer(0))
        value = e.reduction.combine(memory.load(out, row), element)
        return [*evaluator.take(), memory.store(out, row, value)]

    if divides(lanes, depth):
        first = memory.store(out, row, load(partial, row))
        others = loop(parts - 1, lambda part: merge(part + integer(1)))
        return [first, others] if parts > 1 else [first]
    left = integer(depth) - done if sizes_vary() else depth % lanes
    first = memory.store(out, row, e.reduction.init)
    return [first, loop(left, rest, start=done), loop(parts, merge)]
