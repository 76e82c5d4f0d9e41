"""GPU kernels of elementwise stages: neighbouring threads compute neighbouring elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.schedules.gpu.threads import launch, when
from tvmbridge.schedules.gpu.vectors import lanes_for, side_by_side
from tvmbridge.schedules.indexing import Indexer, index_var, integer, unravel
from tvmbridge.schedules.kernel import virtual_stages
from tvmbridge.schedules.loops import loop
from tvmbridge.schedules.rows import RowNest, element_at
from tvmbridge.schedules.tiles import TileNest
from tvmbridge.schedules.values import Evaluator, Memory

_THREADS = 256
# The most elements (or vectors) of one thread, and the number of threads that fills a GPU. A thread
# gets several elements only if the GPU stays full.
_MOST_EACH = 4
_FULL = 132 * 8 * _THREADS


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
    stage, indexer = nest.stage, Indexer()

    def element(position: Expr) -> list[tirx.Stmt]:
        evaluator = Evaluator(nest.kernel, nest.stored, indexer, memory)
        value = evaluator.element(stage, unravel(position, stage.spatial, indexer))
        evaluator.store(stage.buffer, position, value)
        return evaluator.take()

    return [over_elements(indexer, stage.size, element)]


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
