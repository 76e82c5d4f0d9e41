"""Transposes: elementwise stages that write along one axis and read along another.

The loop runs over tiles of a few rows of a few vectors each. So every cache line that is read is
used completely while it is in the first-level cache. A stage that only copies reads whole lines
into a local tile first. Otherwise lines at distances of a multiple of a page evict one another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.core.decisions import fitting, sizes_vary
from tvmbridge.schedules.indexing import Indexer, index_var, integer, unravel
from tvmbridge.schedules.kernel import Kernel, KernelStage, virtual_stages
from tvmbridge.schedules.loops import (
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
    vector_loop,
)
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.reader import Axis, substitute
from tvmbridge.schedules.rows import Member, extent_of
from tvmbridge.schedules.values import Evaluator, Lane, Memory, reads

_TILE_ROWS = 32
_TILE_COLUMNS = 64


@dataclass
class TileNest:
    """The loop nest of one transpose, in tiles over two axes.

    - ``stored``: the buffers that are stored in memory.
    - ``stage``: the elementwise stage, which writes along its last axis.
    - ``across``: the axis along which it reads contiguous memory.
    - ``members``: the stage, as the only member.
    """

    kernel: Kernel
    stored: set[Any]
    stage: KernelStage
    across: Axis
    members: list[Member] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.members = [Member(self.stage, self.stage.size, 0, (self.stage.spatial, ()))]

    def add(self, stage: KernelStage) -> bool:
        """Return False: no other stage can join."""
        return False


def transposed_axis(kernel: Kernel, stored: set[Any], stage: KernelStage) -> Axis | None:
    """Return the axis along which a stage reads contiguous memory, if it is not the last one."""
    indexer = Indexer({axis.var: axis.extent for axis in stage.axes})
    at = {axis.var: axis.var for axis in stage.axes}
    wide = [axis for axis in stage.spatial if axis.extent > 1]
    if stage.reduction is not None or len(wide) < 2 or wide[-1] is not stage.spatial[-1]:
        return None
    for _, buffer, indices in reads(kernel, stored, indexer, stage, at):
        flat = indexer.flat(buffer, indices)
        if indexer.coefficient(flat, wide[-1].var) in (0, 1):
            continue
        for axis in wide[:-1]:
            if indexer.coefficient(flat, axis.var) == 1:
                return axis
    return None


class TileEmitter:
    """Generates the statements of one :class:`TileNest`."""

    def __init__(self, nest: TileNest, machine: Machine, memory: Memory) -> None:
        self.nest, self.machine, self.memory = nest, machine, memory
        self.indexer = Indexer()
        last = nest.stage.spatial[-1]
        self.rows, self.columns = nest.across.extent, last.extent
        self.tile = (
            fitting(lambda n: min(n, _TILE_ROWS), self.rows),
            fitting(lambda n: min(n, _TILE_COLUMNS), self.columns),
        )
        self.outer = [a for a in nest.stage.spatial if a is not nest.across and a is not last]
        stages = virtual_stages(nest.kernel, nest.stored, nest.stage)
        self.work = nest.stage.size * (sum(stage.cost for stage in stages) + 8)
        vectorizable = all(stage.vectorizable for stage in stages)
        self.lanes = power_of_two_below(min(machine.lanes, self.tile[1])) if vectorizable else 1

    def emit(self) -> list[tirx.Stmt]:
        """Return a loop over tiles."""
        across, along = -(-self.rows // self.tile[0]), -(-self.columns // self.tile[1])
        tiles = extent_of(self.outer) * across * along
        parallel = self.machine.chunks(self.work, tiles) > 1
        if sizes_vary():
            return [self._nested(parallel)]

        def body(t: Expr) -> list[tirx.Stmt]:
            if isinstance(t, tirx.Var):
                self.indexer.bind(t, tiles)
            places = [Axis(index_var(n), e, False) for n, e in (("a", across), ("b", along))]
            at = unravel(t, [*self.outer, *places], self.indexer)
            starts = [at.pop(place.var) for place in places]
            return self._tile(at, starts)

        return [loop(tiles, body, tirx.ForKind.PARALLEL if parallel else tirx.ForKind.SERIAL)]

    def _nested(self, parallel: bool) -> tirx.Stmt:
        """Return separate loops over the tiles of each axis, for sizes that vary.

        A single loop would have a product of rounded quotients as its extent.
        """
        outer = extent_of(self.outer)
        kinds = [tirx.ForKind.SERIAL, tirx.ForKind.SERIAL]
        if parallel:
            kinds[0 if outer > 1 else 1] = tirx.ForKind.PARALLEL

        def group(o: Expr) -> list[tirx.Stmt]:
            if isinstance(o, tirx.Var):
                self.indexer.bind(o, outer)
            at = unravel(o, self.outer, self.indexer)

            def across(a: Expr) -> list[tirx.Stmt]:
                def along(b: Expr) -> list[tirx.Stmt]:
                    return self._tile(at, [a, b])

                return [loop(rounded_up(self.columns, self.tile[1]), along)]

            return [loop(rounded_up(self.rows, self.tile[0]), across, kinds[1])]

        return loop_over(outer, group, kinds[0])

    def _tile(self, outer: dict[Any, Expr], starts: Sequence[Expr]) -> list[tirx.Stmt]:
        firsts, binds = [], []
        for start, size, extent in zip(starts, self.tile, (self.rows, self.columns), strict=True):
            first = index_var("first")
            self.indexer.bind(first, extent - size + 1)
            # If tiles do not divide the extent, the last tile overlaps the one before it.
            value = tirx.Min(start * integer(size), less(extent, size))
            binds.append(tirx.Bind(first, value))
            firsts.append(first)

        if self._only_copies():
            return [*binds, *self._through_local(outer, firsts)]

        def row(i: Expr) -> list[tirx.Stmt]:
            if isinstance(i, tirx.Var):
                self.indexer.bind(i, self.tile[0])
            where = outer | {self.nest.across.var: firsts[0] + i}
            return [
                over_vectors(
                    self.tile[1], self.lanes, lambda b, _: self._store(where, firsts[1], b)
                )
            ]

        return [*binds, loop(self.tile[0], row)]

    def _only_copies(self) -> bool:
        """Whether the stage copies elements from memory unchanged."""
        nest, stage = self.nest, self.nest.stage
        if len(stage.loads) != 1 or not stage.value.same_as(stage.loads[0].slot):
            return False
        buffer = stage.loads[0].buffer
        in_memory = buffer in nest.stored or nest.kernel.producer(buffer) is None
        return in_memory and not sizes_vary() and stage.dtype == str(stage.buffer.dtype)

    def _through_local(self, outer: dict[Any, Expr], firsts: Sequence[Expr]) -> list[tirx.Stmt]:
        """Return the statements that read one tile along contiguous memory, and then write it."""
        stage, (of,), (height, width) = self.nest.stage, self.nest.stage.loads, self.tile
        local, allocation = allocate([height * width], stage.dtype, f"{stage.name}_tile")

        def place(row: Expr, column: Expr) -> Expr:
            return column * integer(height) + row

        def at(row: Expr, column: Expr) -> dict[Any, Expr]:
            across, along = self.nest.across.var, stage.spatial[-1].var
            return outer | {across: firsts[0] + row, along: firsts[1] + column}

        def read(column: Expr, row: Expr) -> tirx.Stmt:
            indices = [substitute(i, at(row, column)) for i in of.indices]
            value = self.memory.load(of.buffer, self.indexer.flat(of.buffer, indices))
            return store(local, value, place(row, column))

        def write(row: Expr, column: Expr) -> tirx.Stmt:
            where = at(row, column)
            indices = [where[var] if var is not None else integer(0) for var in stage.dims]
            offset = self.indexer.flat(stage.buffer, indices)
            return self.memory.store(stage.buffer, offset, load(local, place(row, column)))

        lanes = power_of_two_below(min(self.machine.lanes, height))
        return [
            allocation,
            _lines(width, height, lanes, read),
            _lines(height, width, self.lanes, write),
        ]

    def _store(self, where: dict[Any, Expr], first: Expr, base: Expr) -> list[tirx.Stmt]:
        nest, stage = self.nest, self.nest.stage
        if isinstance(base, tirx.Var):
            self.indexer.bind(base, self.tile[1] - self.lanes + 1)

        def body(evaluator: Evaluator, lane: Expr) -> None:
            if isinstance(lane, tirx.Var):
                self.indexer.bind(lane, self.lanes)
            at = where | {stage.spatial[-1].var: first + base + lane}
            value = evaluator.element(stage, at)
            indices = [at[var] if var is not None else integer(0) for var in stage.dims]
            evaluator.store(stage.buffer, self.indexer.flat(stage.buffer, indices), value)

        def fork(lane: Lane) -> Evaluator:
            return Evaluator(nest.kernel, nest.stored, self.indexer, self.memory, lane)

        return element_loop(self.lanes, fork, body)


def emit_tiles(nest: TileNest, machine: Machine, memory: Memory) -> list[tirx.Stmt]:
    """Return the statements of a transpose."""
    return TileEmitter(nest, machine, memory).emit()


def _lines(
    count: int, length: int, lanes: int, element: Callable[[Expr, Expr], tirx.Stmt]
) -> tirx.Stmt:
    """Return a loop over the lines of a tile, with a vector loop over each line."""

    def line(number: Expr) -> list[tirx.Stmt]:
        def vector(first: Expr, _: Expr | None) -> list[tirx.Stmt]:
            return [vector_loop(lanes, lambda lane: [element(number, first + lane)])]

        return [over_vectors(length, lanes, vector)]

    return loop(count, line)
