"""Reductions that do not run row by row: down columns, and along few long rows (to a scalar).

A reduction goes down columns if neighbouring results, and not neighbouring elements of one sum, are
contiguous in memory.

Both have two steps. First, parallel tasks reduce parts, with partial results in vector lanes. Then
the results of the tasks are combined in a fixed order. Many short sums also lose less precision
than one long sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.core.decisions import Rule, decided
from tvmbridge.schedules.indexing import Indexer, index_var, unravel
from tvmbridge.schedules.kernel import Kernel, KernelStage, Reduction, virtual_stages
from tvmbridge.schedules.loops import loop, loop_over
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.reader import mentions
from tvmbridge.schedules.rows import Member, extent_of
from tvmbridge.schedules.values import Evaluator, Lane, Memory, reads

# The most elements that are added to one accumulator before it is combined with others.
LONGEST = 1024


@dataclass
class ReductionNest:
    """A loop nest of one reduction over the depth of ``rows`` x ``depth`` x ``columns`` elements.

    - ``stored``: the buffers that are stored in memory.
    - ``stage``: the reduction.
    - ``columns``: the number of contiguous columns; 1 for a reduction along rows.
    - ``members``: the reduction, and its tail if there is one.
    - ``tail``: an elementwise stage that is computed with each result, in place of storing it.
    """

    kernel: Kernel
    stored: set[Any]
    stage: KernelStage
    rows: int
    columns: int
    members: list[Member] = field(default_factory=list)
    tail: KernelStage | None = None

    def __post_init__(self) -> None:
        axes = self.stage.spatial, self.stage.reduced
        self.members = [Member(self.stage, self.stage.depth, 0, axes)]
        if self.tail is not None:
            self.members.append(Member(self.tail, 1, 1, (self.tail.spatial, [])))

    def add(self, stage: KernelStage) -> bool:
        """Return False: no other stage can join."""
        return False


def columns_of(kernel: Kernel, stored: set[Any], stage: KernelStage) -> int | None:
    """Return the number of contiguous columns if ``stage`` reduces down columns, else None."""
    indexer = Indexer({axis.var: axis.extent for axis in stage.axes})
    at = {axis.var: axis.var for axis in stage.axes}
    wide = [axis for axis in stage.axes if axis.extent > 1]
    reduced = [axis for axis in wide if axis.reduce]
    spatial = [axis for axis in wide if not axis.reduce]
    if not reduced or not spatial:
        return None
    flats = [indexer.flat(b, i) for _, b, i in reads(kernel, stored, indexer, stage, at)]
    # Ignore reads that do not depend on the column.
    across = [flat for flat in flats if mentions(flat, spatial[-1].var)]
    if any(indexer.coefficient(flat, reduced[-1].var) == 1 for flat in across):
        return None
    if not any(indexer.coefficient(flat, spatial[-1].var) == 1 for flat in flats):
        return None
    return _smooth_columns(kernel, stored, stage)


def _smooth_columns(kernel: Kernel, stored: set[Any], stage: KernelStage) -> int | None:
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
    """Generates the statements of one :class:`ReductionNest`."""

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

    def evaluator(self, lane: Lane) -> Evaluator:
        """Return a new evaluator for a position in a vector loop."""
        nest = self.nest
        return Evaluator(nest.kernel, nest.stored, self.indexer, self.memory, lane)

    def element(self, evaluator: Evaluator, row: Expr, depth: Expr, column: Expr) -> Expr:
        """Return the value of the element to reduce at a row, depth and column, bound to a name."""
        depth = self._position(evaluator, depth, self.stage.depth)
        column = self._position(evaluator, column, self.nest.columns)
        at = unravel(row, self.outer, self.indexer) | unravel(column, self.inner, self.indexer)
        at |= unravel(depth, self.stage.reduced, self.indexer)
        return evaluator.name(evaluator.element(self.stage, at), "element")

    def _position(self, evaluator: Evaluator, value: Expr, extent: int) -> Expr:
        if isinstance(value, tirx.Var | tirx.IntImm):
            return value
        position = self.indexer.position(value, extent)
        evaluator.statements.append(tirx.Bind(position, value))
        return position

    def parts(self, tasks: int, steps: int) -> int:
        """Return the number of parts that the reduction of each task is cut into.

        Args:
            tasks: the number of tasks that run in parallel anyway.
        """
        nest = self.nest
        work = nest.rows * nest.columns * self.stage.depth * (self.cost + 8)
        wanted = -(-self.machine.chunks(work, 1 << 30) // tasks)
        parts = max(1, min(wanted, steps // 16), -(-steps // LONGEST))
        return decided(Rule.MIDDLE, lambda: parts)

    def index(self, limit: int, name: str) -> tirx.Var:
        """Return a new variable that is declared to be in [0, limit)."""
        var = index_var(name)
        self.indexer.bind(var, limit)
        return var


def _split_by_columns(stage: KernelStage, columns: int) -> tuple[Any, Any]:
    for cut in range(len(stage.spatial) + 1):
        if extent_of(stage.spatial[cut:]) == columns:
            return stage.spatial[:cut], stage.spatial[cut:]
    raise ValueError(f"{stage.name} has no {columns} trailing columns")


def loop_of_tasks(
    e: ReductionEmitter, tasks: int, task: Any, extent: Expr | None = None
) -> tirx.Stmt:
    """Return a loop over tasks, parallel if there is enough work.

    Args:
        extent: the number of tasks as an expression of sizes; None: it is no quotient.
    """
    nest = e.nest
    work = nest.rows * nest.columns * e.stage.depth * (e.cost + 8)
    parallel = e.machine.chunks(work, tasks) > 1
    kind = tirx.ForKind.PARALLEL if parallel else tirx.ForKind.SERIAL

    def body(t: Expr) -> list[tirx.Stmt]:
        if isinstance(t, tirx.Var):
            e.indexer.bind(t, tasks)
        return task(t)

    return loop_over(tasks, body, kind) if extent is None else loop(extent, body, kind)
