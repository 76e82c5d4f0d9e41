"""GPU kernels of row-wise loop nests: a team of threads for each row, with values in registers.

Softmax or a normalisation, with the stages around it, is one kernel: the passes over a row run one
after another in the same threads. A value from an earlier pass is in registers if each thread reads
only its own columns, and otherwise in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm_ffi
from tvm import tirx
from tvm.ir import Expr

from tvmbridge.schedules.gpu.elementwise import memory_dtypes
from tvmbridge.schedules.gpu.threads import (
    MOST_THREADS,
    WARP,
    Team,
    allocate_in,
    barrier,
    launch,
    when,
)
from tvmbridge.schedules.gpu.vectors import lanes_for, side_by_side
from tvmbridge.schedules.indexing import Indexer, index_var, integer
from tvmbridge.schedules.loops import load, loop, store
from tvmbridge.schedules.reader import Buffer
from tvmbridge.schedules.rows import Member, RowNest, element_at
from tvmbridge.schedules.values import Evaluator, Memory, TooLargeError

# Neighbouring columns of one thread. More would only lengthen the kernel, and its compilation.
_MOST_LANES = 4
# Columns of one thread that registers hold.
_REGISTERS = 32
_SHARED_BYTES = 40_000
# Values between passes that a thread of a merged kernel holds; a thread has 255 registers at most.
_MOST_HELD = 96
_SMALLEST_BLOCK = 128
# The longest row for a single warp, and the same if at least `_MANY` rows fill the GPU with warps.
_WARP_COLUMNS = 256
_WARP_COLUMNS_OF_MANY = 1024
_MANY = 132 * 16


class GpuRowEmitter:
    """Generates the kernel of one :class:`RowNest`.

    - ``shared``: the buffers that are read outside of the loop nest.
    - ``size``: the number of threads in a team.
    - ``teams``: the number of teams in a block.
    - ``local``: the register arrays that hold values between passes, by buffer.
    - ``tile``: the shared-memory arrays that hold rows between passes, by buffer.
    - ``dtypes``: the dtypes of the arrays in memory that may be read or written as vectors.
    """

    def __init__(self, nest: RowNest, shared: set[Any], memory: Memory) -> None:
        self.nest, self.shared, self.memory = nest, shared, memory
        self.indexer = Indexer()
        self.evaluator = Evaluator(nest.kernel, nest.stored, self.indexer, memory)
        widest = max(m.columns for m in nest.members)
        self.size = _team_size(widest, nest.rows)
        self.teams = _SMALLEST_BLOCK // self.size if self.size <= WARP else 1
        self.local: dict[Any, Buffer] = {}
        self.tile: dict[Any, Buffer] = {}
        self.dtypes = memory_dtypes(nest, shared)
        # A thread's column in the current pass, and the number of its register.
        self.register_of: tuple[Expr | None, Expr] = None, integer(0)

    def emit(self) -> list[tirx.Stmt]:
        """Return the kernel of the loop nest, as a list of one statement."""
        blocks = -(-self.nest.rows // self.teams)
        return [launch(self.indexer, blocks, self.size * self.teams, self._block)]

    def _block(self, block: Expr, thread: Expr) -> list[tirx.Stmt]:
        rows, size = self.nest.rows, integer(self.size)
        self.rank = self.indexer.simplify(thread % size)
        self.place = self.indexer.simplify(thread // size)
        self.team = Team(self.size, self.rank)
        row = index_var("row")
        self.indexer.bind(row, rows)
        own = block * integer(self.teams) + self.place
        if rows % self.teams:
            # Teams without a row repeat the last row, because all threads must reach barriers.
            own = tirx.Min(own, integer(rows - 1))
        statements: list[tirx.Stmt] = [tirx.Bind(row, own), *self.allocations()]
        self._redirect(row)
        return statements + self.nest.in_passes(
            lambda member: self._scalar(member, row),
            lambda members: self._pass(members, row),
            lambda members: [barrier()] if any(m.crossed for m in members) else [],
        )

    def allocations(self) -> list[tirx.Stmt]:
        """Allocate registers and shared memory for values that later passes read."""
        statements, shared_bytes = [], 0
        for member in self.nest.members:
            stage, buffer = member.stage, member.stage.buffer
            if not member.kept or (member.crossed and buffer in self.shared):
                continue
            if member.crossed:
                count = self.teams * member.columns
                shared_bytes += count * np.dtype(stage.dtype).itemsize
                if shared_bytes > _SHARED_BYTES:
                    raise TooLargeError
                name = f"{stage.name}_row"
                self.tile[buffer], room = allocate_in("shared", count, stage.dtype, name)
                statements.append(room)
            elif self._registers(member.columns) <= _REGISTERS:
                name, count = f"{stage.name}_own", self._registers(member.columns)
                self.local[buffer], room = allocate_in("local", count, stage.dtype, name)
                statements.append(room)
            elif buffer not in self.shared:
                raise TooLargeError
        return statements

    def _lanes(self, columns: int) -> int:
        """Return the number of neighbouring columns of a thread, such that no thread is idle."""
        return min(_MOST_LANES, lanes_for(self.dtypes, columns, self.size))

    def _steps(self, columns: int) -> int:
        return -(-columns // (self.size * self._lanes(columns)))

    def _registers(self, columns: int) -> int:
        return self._steps(columns) * self._lanes(columns)

    def _redirect(self, row: Expr) -> None:
        """Redirect reads of values of earlier passes to registers or shared memory."""
        for member in self.nest.members:
            buffer = member.stage.buffer
            if buffer in self.local:
                self.evaluator.places[buffer] = self._in_registers(member, row)
            elif buffer in self.tile:
                self.evaluator.places[buffer] = self._in_tile(member, row)

    def _in_registers(self, member: Member, row: Expr) -> Callable[[Expr], Expr]:
        local, lanes = self.local[member.stage.buffer], integer(self._lanes(member.columns))
        columns, width = integer(member.columns), integer(self.size) * lanes

        def place(offset: Expr) -> Expr:
            column = self.indexer.simplify(offset - row * columns)
            known, register = self.register_of
            if known is not None and tvm_ffi.structural_equal(column, known):
                return load(local, register)
            number = column // width * lanes + column % lanes
            return load(local, self.indexer.simplify(number))

        return place

    def _in_tile(self, member: Member, row: Expr) -> Callable[[Expr], Expr]:
        tile, columns = self.tile[member.stage.buffer], integer(member.columns)
        start = self.place * columns

        def place(offset: Expr) -> Expr:
            return load(tile, self.indexer.simplify(start + (offset - row * columns)))

        return place

    def _scalar(self, member: Member, row: Expr) -> list[tirx.Stmt]:
        at = element_at(member, row, integer(0), self.indexer)
        return self._set_scalar(member, self.evaluator.element(member.stage, at), row)

    def _set_scalar(self, member: Member, value: Expr, row: Expr) -> list[tirx.Stmt]:
        """Make later reads of a row's scalar return ``value``; store it if others read it."""
        stage = member.stage
        named = self.evaluator.name(value, stage.name)
        self.evaluator.places[stage.buffer] = lambda _: named
        statements = self.evaluator.take()
        if stage.buffer in self.shared:
            first = self.rank.equal(integer(0))
            statements += when(first, [self.memory.store(stage.buffer, row, named)])
        return statements

    def _pass(self, members: Sequence[Member], row: Expr) -> list[tirx.Stmt]:
        """Return one loop over a thread's columns, and the reductions over a team's threads."""
        columns, size = members[0].columns, self.size
        reducing = [m for m in members if m.stage.reduction is not None]
        sums, statements = {}, []
        for member in reducing:
            stage = member.stage
            assert stage.reduction is not None
            sums[stage.buffer], room = allocate_in("local", 1, stage.dtype, f"{stage.name}_sum")
            statements += [room, store(sums[stage.buffer], stage.reduction.init, integer(0))]

        lanes = self._lanes(columns)
        groups = columns // lanes

        def step(i: Expr) -> list[tirx.Stmt]:
            if isinstance(i, tirx.Var):
                self.indexer.bind(i, self._steps(columns))
            own = self.indexer.simplify(i * integer(size) + self.rank)
            if lanes == 1 and columns % size == 0:
                return self._column(members, sums, row, own, i)
            # A variable with a known range: the simplifier cannot find the range in the expression.
            group = index_var("column")
            self.indexer.bind(group, groups)

            def element(column: Expr, lane: Expr) -> list[tirx.Stmt]:
                register = self.indexer.simplify(i * integer(lanes) + lane)
                self.register_of = column, register
                return self._column(members, sums, row, column, register)

            if lanes == 1:
                elements = element(group, integer(0))
            else:
                elements = side_by_side(self.indexer, lanes, group * integer(lanes), element)
            inside = None if groups % size == 0 else own < integer(groups)
            return when(inside, [tirx.Bind(group, own), *elements])

        statements.append(loop(self._steps(columns), step))
        for member in reducing:
            stage, total = member.stage, sums[member.stage.buffer]
            assert stage.reduction is not None
            statements += self.team.all_reduce(total, stage.reduction, stage.dtype)
            statements += self._set_scalar(member, load(total, integer(0)), row)
        return statements

    def _column(
        self, members: Sequence[Member], sums: Any, row: Expr, column: Expr, register: Expr
    ) -> list[tirx.Stmt]:
        """Return the statements that compute the elements of all members at one column."""
        evaluator, indexer = self.evaluator.fork(), self.indexer
        for member in members:
            stage = member.stage
            at = element_at(member, row, column, indexer)
            value = evaluator.name(evaluator.element(stage, at), stage.name)
            if stage.reduction is not None:
                total = sums[stage.buffer]
                new = stage.reduction.combine(load(total, integer(0)), value)
                evaluator.statements.append(store(total, new, integer(0)))
                continue
            indices = [integer(0) if v is None else at[v] for v in stage.dims]
            evaluator.remember(stage.buffer, indexer.flat(stage.buffer, indices), value)
            self._keep(member, evaluator, row, column, register, value)
        return evaluator.take()

    def _keep(
        self,
        member: Member,
        evaluator: Evaluator,
        row: Expr,
        column: Expr,
        register: Expr,
        value: Expr,
    ) -> None:
        """Add the statements that store an element in all places where it is read later."""
        buffer = member.stage.buffer
        offset = self.indexer.simplify(row * integer(member.columns) + column)
        evaluator.remember(buffer, offset, value)
        if buffer in self.shared:
            evaluator.store(buffer, offset, value)
        if buffer in self.local:
            evaluator.statements.append(store(self.local[buffer], value, register))
        elif buffer in self.tile:
            at = self.indexer.simplify(self.place * integer(member.columns) + column)
            evaluator.statements.append(store(self.tile[buffer], value, at))


def _team_size(columns: int, rows: int) -> int:
    """Return the number of threads for a row, a power of two.

    Short rows get at most one warp, which needs no barriers. Longer rows get one thread for four
    columns. If there are few rows, the limit for one warp is lower, to keep the GPU busy.
    """
    longest = _WARP_COLUMNS_OF_MANY if rows >= _MANY else _WARP_COLUMNS
    wanted = columns if columns <= WARP else WARP if columns <= longest else -(-columns // 4)
    return min(1 << max(wanted - 1, 0).bit_length(), MOST_THREADS)


def fits_registers(nest: RowNest) -> bool:
    """Whether a thread's registers and a block's shared memory hold the values between passes."""
    emitter = GpuRowEmitter(nest, nest.kernel.outputs, Memory())
    try:
        emitter.allocations()
    except TooLargeError:
        return False
    held = sum(int(buffer.shape[0]) for buffer in emitter.local.values())
    return held <= _MOST_HELD
