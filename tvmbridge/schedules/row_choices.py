"""Choose the number of rows of a loop nest, by the reads and conditions of its columns.

Rows are best if reads advance by at most one element from column to column. All columns of a row
should also take the same branch of each choice: the condition is then a scalar, not a vector. For a
concatenation, rows may end inside an axis, at the bounds of the pieces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr

from tvmbridge.core.decisions import sizes_vary
from tvmbridge.schedules.indexing import Indexer, cut_axes, divisors_of, index_var, unravel
from tvmbridge.schedules.kernel import Kernel, KernelStage
from tvmbridge.schedules.reader import Axis, substitute, variables
from tvmbridge.schedules.rows import Member, RowNest, element_at, extent_of
from tvmbridge.schedules.values import reads

_LEAST_RUN = 8


def smooth_rows(
    kernel: Kernel, stored: set[Any], stage: KernelStage, *, within: bool = False
) -> int | None:
    """Return the fewest rows for which reads move by 0 or 1 from column to column, if any.

    Numbers of rows for which all columns take the same branches are preferred. If ``within`` is
    set, rows may end inside an axis for this, as at the pieces of a concatenation.
    """
    row, column = index_var("row"), index_var("column")
    rows, first = 1, None
    for cut in range(len(stage.spatial)):
        rows = extent_of(stage.spatial[:cut])
        if cut and stage.spatial[cut - 1].extent == 1:
            continue
        axes = stage.spatial[:cut], stage.spatial[cut:]
        indexer = Indexer({row: rows, column: extent_of(axes[1])})
        at: dict[Any, Expr] = unravel(row, axes[0], indexer) | unravel(column, axes[1], indexer)
        moves = (
            indexer.coefficient(indexer.flat(buffer, indices), column)
            for _, buffer, indices in reads(kernel, stored, indexer, stage, at)
        )
        if not all(move in (0, 1) for move in moves):
            continue
        wide = first is None or extent_of(axes[1]) >= _LEAST_RUN
        if wide and _is_uniform(kernel, stored, indexer, stage, at, row):
            return rows
        first = first or rows
    if within and (rows_of_pieces := _rows_of_pieces(kernel, stored, stage)):
        return rows_of_pieces
    return 1 if not stage.spatial else first


def _rows_of_pieces(kernel: Kernel, stored: set[Any], stage: KernelStage) -> int | None:
    """Return the fewest rows such that each row is within one piece of a concatenation, or None."""
    row, column = index_var("row"), index_var("column")
    before = 1
    for axis in stage.spatial:
        length = math.gcd(axis.extent, *_bounds(kernel, stored, stage, axis))
        rows = before * (axis.extent // length)
        before *= axis.extent
        columns = stage.size // rows
        if length == axis.extent or columns < _LEAST_RUN:
            continue
        parts = cut_axes(stage.spatial, rows)
        if parts is None:
            continue
        indexer = Indexer({row: rows, column: columns})
        member = Member(stage, columns, 0, parts[:2], cut=parts[2])
        at = element_at(member, row, column, indexer)
        if _is_uniform(kernel, stored, indexer, stage, at, row):
            return rows
    return None


def _bounds(kernel: Kernel, stored: set[Any], stage: KernelStage, axis: Axis) -> list[int]:
    """Return the constants that ``axis`` is compared with in conditions of reads."""
    found: list[int] = []

    def note(condition: tirx.LT) -> None:
        if condition.a.same_as(axis.var) and isinstance(condition.b, tirx.IntImm):
            found.append(int(condition.b))

    def look(reader: KernelStage, at: Mapping[Any, Expr]) -> None:
        for guard in reader.guards or ():
            tvm_ffi.structural_walk(substitute(guard, dict(at)), (tirx.LT, note))
        for load in reader.loads:
            producer = None if load.buffer in stored else kernel.producer(load.buffer)
            if producer is not None:
                look(producer, producer.at([substitute(i, dict(at)) for i in load.indices]))

    look(stage, {})
    return found


def _is_uniform(
    kernel: Kernel,
    stored: set[Any],
    indexer: Indexer,
    stage: KernelStage,
    at: Mapping[Any, Expr],
    row: tirx.Var,
) -> bool:
    """Whether all columns of a row take the same branches, so that they can be vectorized."""
    if not stage.vectorizable:
        if stage.guards is None:
            return False
        conditions = (indexer.simplify(substitute(guard, dict(at))) for guard in stage.guards)
        if not all(variables(condition) <= {row} for condition in conditions):
            return False
    for load in stage.loads:
        producer = None if load.buffer in stored else kernel.producer(load.buffer)
        if producer is not None:
            indices = tuple(indexer.simplify(substitute(i, dict(at))) for i in load.indices)
            inner = producer.at(indices)
            if not _is_uniform(kernel, stored, indexer, producer, inner, row):
                return False
    return True


def are_uniform(nest: RowNest, members: Sequence[Member]) -> bool:
    """Whether all columns of a row take the same branches, for each of ``members``."""
    kernel, row = nest.kernel, nest.row
    indexer = Indexer({row: nest.rows, nest.column: members[0].columns})
    for member in members:
        at = element_at(member, row, nest.column, indexer)
        if not _is_uniform(kernel, nest.stored, indexer, member.stage, at, row):
            return False
    return True


def run_of(nest: RowNest, members: Sequence[Member]) -> int:
    """Return the number of columns after which a read of ``members`` jumps to another address.

    For example, a sum over batch and positions reads the positions of one image contiguously.
    Return all columns if no read jumps, or if runs are shorter than a vector.
    """
    columns = members[0].columns
    if sizes_vary():
        return columns
    run = 0
    for member in members:
        indexer = Indexer({nest.row: nest.rows, nest.column: columns})
        at = element_at(member, nest.row, nest.column, indexer)
        for _, buffer, indices in reads(nest.kernel, nest.stored, indexer, member.stage, at):
            for divisor in divisors_of(indexer.flat(buffer, indices), nest.column):
                run = math.gcd(run, divisor)
    return run if run >= _LEAST_RUN and columns % run == 0 else columns
