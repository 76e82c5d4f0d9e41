"""Generate CPU loops for a row-wise loop nest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.core.decisions import divides, fitting
from tvmbridge.schedules.accumulators import Accumulator, in_stretches
from tvmbridge.schedules.down_sums import DownSum, parts_of
from tvmbridge.schedules.indexing import Indexer, index_var, integer
from tvmbridge.schedules.kernel import virtual_stages
from tvmbridge.schedules.loops import (
    Body,
    allocate,
    element_loop,
    less,
    load,
    loop,
    loop_over,
    over_vectors,
    power_of_two_below,
    rounded_up,
    store,
)
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.reader import Buffer
from tvmbridge.schedules.row_choices import are_uniform, run_of
from tvmbridge.schedules.rows import Member, RowNest, element_at
from tvmbridge.schedules.values import Evaluator, Memory

# A pass with fewer expression nodes than this has several accumulators, to hide their latency.
_CHEAP_PASS = 24


class RowEmitter:
    """Generates the statements of one :class:`RowNest`.

    - ``shared``: the buffers that are read outside of the loop nest.
    - ``local``: the buffers that hold one row, by the buffer that they replace.
    - ``sums``: the partial results of reductions over the rows.
    - ``part``: the parallel part that is generated.
    """

    def __init__(self, nest: RowNest, machine: Machine, shared: set[Any], memory: Memory) -> None:
        self.nest, self.machine, self.shared, self.memory = nest, machine, shared, memory
        self.local: dict[Any, Buffer] = {}
        self.sums: dict[Any, DownSum] = {}
        self.part: Expr = integer(0)
        self.indexer = Indexer()
        self.evaluator = Evaluator(nest.kernel, nest.stored, self.indexer, memory)

    def emit(self) -> list[tirx.Stmt]:
        """Return the statements of the loop nest."""
        rows, machine, members = self.nest.rows, self.machine, self.nest.members
        if rows == 1 and self._is_flat():
            return self._flat()
        chunks = parts_of(members, machine, machine.chunks(self.work(), rows))
        downs = [m.stage for m in members if m.down]
        self.sums = {stage.buffer: DownSum.of(stage, chunks, machine) for stage in downs}

        def chunk(p: Expr) -> list[tirx.Stmt]:
            if isinstance(p, tirx.Var):
                self.indexer.bind(p, chunks)
            self.part = p
            begun = [*self._allocations(), *(each.begin(p) for each in self.sums.values())]
            if chunks == 1:
                return [*begun, loop_over(rows, lambda row: self._row(row))]
            first, last = (integer(rows) * q // integer(chunks) for q in (p, p + integer(1)))
            return [*begun, loop(last - first, lambda row: self._row(row), start=first)]

        bound = loop(chunks, chunk, tirx.ForKind.PARALLEL)
        fork = self.evaluator.fork
        ended = [s for each in self.sums.values() for s in each.end(self.memory, fork)]
        return [*(each.room for each in self.sums.values()), bound, *ended]

    def work(self) -> int:
        """Return about how many expression nodes the loop nest evaluates."""
        nest = self.nest
        work = 0
        for member in nest.members:
            stages = virtual_stages(nest.kernel, nest.stored, member.stage)
            work += nest.rows * member.columns * (sum(stage.cost for stage in stages) + 8)
        return work

    def _is_flat(self) -> bool:
        return all(
            m.time == 0 and m.stage.reduction is None and m.looped for m in self.nest.members
        )

    def _flat(self) -> list[tirx.Stmt]:
        """Return a loop of elementwise stages over one long row, divided among the cores."""
        members = self.nest.members
        columns, row = members[0].columns, integer(0)
        lanes = self._lanes(members, columns, columns)
        steps, whole = rounded_up(columns, lanes), divides(lanes, columns)
        chunks = self.machine.chunks(self.work(), -(-columns // lanes))

        def step(i: Expr) -> list[tirx.Stmt]:
            base = index_var("base")
            self.indexer.bind(base, columns - lanes + 1)
            last = less(columns, lanes)
            at = i * integer(lanes)
            bind = tirx.Bind(base, at if whole else tirx.Min(at, last))
            return [bind, *self._vectors(members, [], row, base, None, lanes)]

        def chunk(p: Expr) -> list[tirx.Stmt]:
            count = integer(steps) if isinstance(steps, int) else steps
            first, last = (count * q // integer(chunks) for q in (p, p + integer(1)))
            return [loop(last - first, step, start=first)]

        if chunks == 1:
            return [loop(steps, step)]
        return [loop(chunks, chunk, tirx.ForKind.PARALLEL)]

    def _allocations(self) -> list[tirx.Stmt]:
        statements = []
        for member in self.nest.members:
            buffer = member.stage.buffer
            if member.kept and buffer not in self.shared:
                self.local[buffer], statement = allocate(
                    [member.columns], member.stage.dtype, f"{member.stage.name}_row"
                )
                statements.append(statement)
        return statements

    def _row(self, row: Expr) -> list[tirx.Stmt]:
        """Return the statements of all passes over one row."""
        if isinstance(row, tirx.Var):
            self.indexer.bind(row, self.nest.rows)
        self._redirect(row)
        return self.nest.in_passes(
            lambda member: self._scalar(member, row), lambda members: self._pass(members, row)
        )

    def _redirect(self, row: Expr) -> None:
        """Redirect reads of buffered rows to their local buffers."""
        self.evaluator = self.evaluator.fork()
        self.evaluator.places.clear()
        for member in self.nest.members:
            buffer = member.stage.buffer
            if buffer in self.local:
                self.evaluator.places[buffer] = self._place(member, row)

    def _place(self, member: Member, row: Expr) -> Callable[[Expr], Expr]:
        local, columns = self.local[member.stage.buffer], integer(member.columns)
        return lambda offset: load(local, self.indexer.simplify(offset - row * columns))

    def _set_scalar(self, member: Member, value: Expr, row: Expr) -> list[tirx.Stmt]:
        """Make later reads of a row's scalar return ``value``; store it if others read it."""
        stage = member.stage
        named = self.evaluator.name(value, stage.name)
        self.evaluator.places[stage.buffer] = lambda _: named
        if stage.buffer in self.shared:
            self.evaluator.store(stage.buffer, row, named)
        return self.evaluator.take()

    def _scalar(self, member: Member, row: Expr) -> list[tirx.Stmt]:
        at = element_at(member, row, integer(0), self.indexer)
        return self._set_scalar(member, self.evaluator.element(member.stage, at), row)

    def _lanes(self, members: Sequence[Member], columns: int, run: int) -> int:
        nest = self.nest
        stages = [s for m in members for s in virtual_stages(nest.kernel, nest.stored, m.stage)]
        if not all(stage.vectorizable for stage in stages) and not are_uniform(nest, members):
            return 1
        cheap = sum(stage.cost for stage in stages) < _CHEAP_PASS
        wide = cheap and any(m.along for m in members)
        return fitting(partial(_lanes_for, self.machine.lanes, wide), run, columns)

    def _pass(self, members: Sequence[Member], row: Expr) -> list[tirx.Stmt]:
        """Return one loop over the columns, and the statements that finish its reductions."""
        columns = members[0].columns
        run = run_of(self.nest, members)
        lanes = self._lanes(members, columns, run)
        # Without vectors there are several sums as well: one long sum has larger rounding errors.
        widest = self.machine.lanes
        places = fitting(
            lambda n: lanes if lanes > 1 else power_of_two_below(min(widest, n)), columns
        )
        accumulators = [
            Accumulator.of(m.stage, places, -(-columns // lanes)) for m in members if m.along
        ]
        statements = [s for a in accumulators for s in a.begin()]

        def step(base: Expr, fresh: Expr | None) -> list[tirx.Stmt]:
            if isinstance(base, tirx.Var):
                self.indexer.bind(base, columns - lanes + 1)
            return self._vectors(members, accumulators, row, base, fresh, lanes)

        loops = in_stretches(accumulators)
        if run < columns and run % lanes:
            statements.append(self._over_runs(columns // run, run, lanes, step, loops))
        else:
            statements.append(over_vectors(columns, lanes, step, loops))
        for member in members:
            for accumulator in (a for a in accumulators if a.stage is member.stage):
                statements += accumulator.end()
                statements += self._set_scalar(member, accumulator.result(), row)
        return statements

    def _over_runs(
        self,
        count: int,
        run: int,
        lanes: int,
        body: Callable[[Expr, Expr | None], list[tirx.Stmt]],
        steps: Callable[[int | Expr, Body], tirx.Stmt],
    ) -> tirx.Stmt:
        """Return a loop like that of :func:`over_vectors`, in each of ``count`` runs of columns."""
        each = -(-run // lanes)

        def step(i: Expr) -> list[tirx.Stmt]:
            which, within = index_var("run"), index_var("within")
            self.indexer.bind(which, count)
            self.indexer.bind(within, run - lanes + 1)
            first = i % integer(each) * integer(lanes)
            start = which * integer(run)
            return [
                tirx.Bind(which, i // integer(each)),
                tirx.Bind(within, tirx.Min(first, integer(run - lanes))),
                *body(start + within, start + first),
            ]

        return steps(count * each, step)

    def _vectors(
        self,
        members: Sequence[Member],
        accumulators: Sequence[Accumulator],
        row: Expr,
        base: Expr,
        fresh: Expr | None,
        lanes: int,
    ) -> list[tirx.Stmt]:
        """Return a vector loop that computes the members' elements at ``lanes`` columns.

        Args:
            accumulators: the accumulators of the members that reduce the row.
            fresh: the first column that no earlier vector computed; None if vectors do not overlap.
        """

        def body(evaluator: Evaluator, lane: Expr) -> None:
            if isinstance(lane, tirx.Var):
                self.indexer.bind(lane, lanes)
            column = self.indexer.simplify(base + lane)
            position = self.indexer.position(column, members[0].columns)
            evaluator.statements.append(tirx.Bind(position, column))
            for member in members:
                at = element_at(member, row, position, self.indexer)
                value = evaluator.element(member.stage, at)
                stage = member.stage
                if not member.along:
                    indices = [integer(0) if v is None else at[v] for v in stage.dims]
                    offset = self.indexer.flat(stage.buffer, indices)
                    if member.down:
                        new = None if fresh is None else column >= fresh
                        self.sums[stage.buffer].add(evaluator, self.part, offset, value, new)
                        continue
                    value = self._keep(member, evaluator, row, column, value)
                    # Readers compute this offset; it may not simplify to the one in `_keep`.
                    evaluator.remember(stage.buffer, offset, value)
                    continue
                assert stage.reduction is not None
                target = next(a for a in accumulators if a.stage is stage)
                place = lane if lanes > 1 else column % integer(target.lanes)
                old = evaluator.name(load(target.buffer, place), "old")
                value = evaluator.name(value, "element")
                new = stage.reduction.combine(old, value)
                if fresh is not None:
                    new = tirx.Select(column >= fresh, new, old)
                evaluator.statements.append(store(target.buffer, new, place))

        return element_loop(lanes, self.evaluator.fork, body)

    def _keep(
        self, member: Member, evaluator: Evaluator, row: Expr, column: Expr, value: Expr
    ) -> Expr:
        """Record an element for reads in this pass, and store it if it is needed later."""
        stage = member.stage
        offset = self.indexer.simplify(row * integer(member.columns) + column)
        named = evaluator.name(value, stage.name)
        evaluator.remember(stage.buffer, offset, named)
        if stage.buffer in self.shared:
            evaluator.store(stage.buffer, offset, named)
        elif stage.buffer in self.local:
            evaluator.statements.append(store(self.local[stage.buffer], named, column))
        return named


def _lanes_for(widest: int, wide: bool, run: int, columns: int) -> int:
    """Return the number of lanes for rows of ``columns`` in runs; ``wide``: up to four vectors."""
    lanes = power_of_two_below(min(widest, run))
    while wide and lanes < 4 * widest and 4 * lanes <= columns:
        if run < columns and run % (2 * lanes):
            break
        lanes *= 2
    return lanes
