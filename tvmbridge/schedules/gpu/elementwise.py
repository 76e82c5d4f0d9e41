"""GPU kernels of elementwise stages: neighbouring threads compute neighbouring elements."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.core.decisions import sizes_vary
from tvmbridge.schedules.bfloat16 import held_as
from tvmbridge.schedules.gpu.threads import WARP, allocate_in, barrier, launch, when
from tvmbridge.schedules.gpu.vectors import lanes_for, side_by_side
from tvmbridge.schedules.indexing import Indexer, index_var, integer, unravel
from tvmbridge.schedules.kernel import virtual_stages
from tvmbridge.schedules.loops import load, loop, store
from tvmbridge.schedules.reader import Axis
from tvmbridge.schedules.rows import RowNest, element_at
from tvmbridge.schedules.tiles import TileNest
from tvmbridge.schedules.values import Evaluator, Memory

_THREADS = 256
# The most elements (or vectors) of one thread, and the number of threads that fills a GPU. A thread
# gets several elements only if the GPU stays full.
_MOST_EACH = 4
_FULL = 132 * 8 * _THREADS
# The least extents of the axes of a transpose in tiles: most threads of a tile have work.
_LEAST_TILED = 16


def emit_elementwise(nest: RowNest, shared: set[Any], memory: Memory) -> list[tirx.Stmt]:
    """Return the kernel of a loop nest that ``is_elementwise``."""
    columns, total = nest.members[0].columns, nest.rows * nest.members[0].columns
    indexer = Indexer()

    def element(position: Expr) -> list[tirx.Stmt]:
        row = indexer.simplify(position // integer(columns))
        column = indexer.simplify(position % integer(columns))
        evaluator = Evaluator(nest.kernel, nest.stored, indexer, memory)
        for member in nest.members:
            stage = member.stage
            at = element_at(member, row, column, indexer)
            named = evaluator.name(evaluator.element(stage, at), stage.name)
            indices = [integer(0) if v is None else at[v] for v in stage.dims]
            evaluator.remember(stage.buffer, indexer.flat(stage.buffer, indices), named)
            if stage.buffer in shared:
                evaluator.store(stage.buffer, position, named)
        return evaluator.take()

    return [over_elements(indexer, total, element, memory_dtypes(nest, shared))]


def memory_dtypes(nest: RowNest, shared: set[Any]) -> list[str]:
    """Return the dtypes of the arrays that a loop nest reads or writes in memory.

    ``shared`` are the buffers that are read outside of the loop nest.
    """
    buffers = {m.stage.buffer for m in nest.members if m.stage.buffer in shared}
    for member in nest.members:
        for stage in virtual_stages(nest.kernel, nest.stored, member.stage):
            buffers |= {
                load.buffer for load in stage.loads if nest.kernel.producer(load.buffer) is None
            }
    return [str(buffer.dtype) for buffer in buffers]


def emit_transpose(nest: TileNest, memory: Memory) -> list[tirx.Stmt]:
    """Return the kernel of a stage that reads along another axis than it writes."""
    if not sizes_vary() and min(nest.across.extent, nest.stage.spatial[-1].extent) >= _LEAST_TILED:
        return [_TiledTranspose(nest, memory).kernel()]
    stage, indexer = nest.stage, Indexer()

    def element(position: Expr) -> list[tirx.Stmt]:
        evaluator = Evaluator(nest.kernel, nest.stored, indexer, memory)
        value = evaluator.element(stage, unravel(position, stage.spatial, indexer))
        evaluator.store(stage.buffer, position, value)
        return evaluator.take()

    return [over_elements(indexer, stage.size, element)]


class _TiledTranspose:
    """Generates a kernel in which each block transposes a square tile in shared memory.

    The threads of a warp read neighbours along one axis, and write neighbours along the other.
    """

    def __init__(self, nest: TileNest, memory: Memory) -> None:
        self.nest, self.memory, self.stage, self.indexer = nest, memory, nest.stage, Indexer()
        self.across, self.along = nest.across, nest.stage.spatial[-1]

    def kernel(self) -> tirx.Stmt:
        """Return the kernel, with a block for each tile."""
        sides = (self.across, self.along)
        outer = [axis for axis in self.stage.spatial if axis not in sides]
        tiles = [Axis(index_var("tile"), -(-axis.extent // WARP), False) for axis in sides]

        def body(block: Expr, thread: Expr) -> list[tirx.Stmt]:
            at = unravel(block, [*outer, *tiles], self.indexer)
            starts = [at.pop(tile.var) * integer(WARP) for tile in tiles]
            return self._tile(at, starts, thread)

        blocks = prod(axis.extent for axis in (*outer, *tiles))
        return launch(self.indexer, blocks, _THREADS, body)

    def _tile(
        self, at: Mapping[Any, Expr], starts: Sequence[Expr], thread: Expr
    ) -> list[tirx.Stmt]:
        lane, warp = thread % integer(WARP), thread // integer(WARP)
        warps = _THREADS // WARP
        # Each row of the tile ends with an unused element: a column's elements lie in different
        # banks of the shared memory.
        tile, room = allocate_in("shared", WARP * (WARP + 1), held_as(self.stage.dtype), "tile")

        def over_warps(line: Callable[[Expr], list[tirx.Stmt]]) -> tirx.Stmt:
            """Return a loop in which each warp handles several of the tile's lines."""

            def step(i: Expr) -> list[tirx.Stmt]:
                if isinstance(i, tirx.Var):
                    self.indexer.bind(i, WARP // warps)
                return line(i * integer(warps) + warp)

            return loop(WARP // warps, step)

        def read(line: Expr) -> list[tirx.Stmt]:
            here = self._element(at, starts, lane, line)
            evaluator = Evaluator(self.nest.kernel, self.nest.stored, self.indexer, self.memory)
            value = evaluator.element(self.stage, here)
            kept = store(tile, value, line * integer(WARP + 1) + lane)
            return when(self._inside(here), [*evaluator.take(), kept])

        def write(line: Expr) -> list[tirx.Stmt]:
            here, buffer = self._element(at, starts, line, lane), self.stage.buffer
            position = self.indexer.flat(buffer, [here.get(v, integer(0)) for v in self.stage.dims])
            value = load(tile, lane * integer(WARP + 1) + line)
            return when(self._inside(here), [self.memory.store(buffer, position, value)])

        return [room, over_warps(read), barrier(), over_warps(write)]

    def _element(
        self, at: Mapping[Any, Expr], starts: Sequence[Expr], across: Expr, along: Expr
    ) -> dict[Any, Expr]:
        """Return the axis values of an element of the tile that begins at ``starts``."""
        places = {self.across.var: starts[0] + across, self.along.var: starts[1] + along}
        return {**at, **{var: self.indexer.simplify(place) for var, place in places.items()}}

    def _inside(self, here: Mapping[Any, Expr]) -> Expr | None:
        """Return whether an element exists; None: all elements of all tiles do."""
        ragged = [axis for axis in (self.across, self.along) if axis.extent % WARP]
        tests = [here[axis.var] < integer(axis.extent) for axis in ragged]
        return functools.reduce(tirx.And, tests) if tests else None


def over_elements(
    indexer: Indexer,
    total: int,
    element: Callable[[Expr], list[tirx.Stmt]],
    dtypes: Sequence[str] = (),
) -> tirx.Stmt:
    """Return a kernel that runs ``element(position)`` for each position below ``total``.

    ``dtypes``: the dtypes of the arrays that may be read or written as vectors.
    """
    lanes = lanes_for(dtypes, total, _FULL // 4)
    count = total // lanes
    each = max(1, min(_MOST_EACH, count // _FULL))
    tile = _THREADS * each

    def body(block: Expr, thread: Expr) -> list[tirx.Stmt]:
        def one(i: Expr) -> list[tirx.Stmt]:
            if isinstance(i, tirx.Var):
                indexer.bind(i, each)
            own = indexer.simplify(block * integer(tile) + i * integer(_THREADS) + thread)
            inside = None if count % tile == 0 else own < integer(count)
            if lanes == 1:
                return when(inside, element(own))
            vector = index_var("vector")
            indexer.bind(vector, count)
            position = vector * integer(lanes)
            vectors = side_by_side(indexer, lanes, position, lambda at, _: element(at))
            return when(inside, [tirx.Bind(vector, own), *vectors])

        return [loop(each, one)]

    return launch(indexer, -(-count // tile), _THREADS, body)
