"""Reductions over the rows of a nest, made beside what else is done with each row.

Each parallel part of the rows has results of its own; they are combined when all parts are done.
The gradients of a norm's weights are made so, in the pass that makes that of its input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.core.decisions import sizes_vary
from tvmbridge.schedules.columns_emit import combine_parts
from tvmbridge.schedules.indexing import integer
from tvmbridge.schedules.kernel import Kernel, KernelStage
from tvmbridge.schedules.loops import allocate, load, over_vectors, power_of_two_below, vector_loop
from tvmbridge.schedules.loops import store as stored_at
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.reader import Buffer
from tvmbridge.schedules.reductions import LONGEST, columns_of
from tvmbridge.schedules.rows import Member
from tvmbridge.schedules.values import Evaluator, Lane, Memory

# Results of all that one nest reduces so: they stay in the second-level cache.
_MOST_RESULTS = 32768
# Rows that one part adds to each result, at least: else to begin and to combine takes longer.
_LEAST_DEPTH = 16


def down_buffers(
    kernel: Kernel, stored: set[Any], stages: Sequence[KernelStage], machine: Machine
) -> set[Any]:
    """The results of those reductions that may be made beside other things of the rows.

    They lie side by side, are few, and are read by no stage.
    """
    if not machine.merges or sizes_vary():
        return set()
    read = {load.buffer for stage in kernel.stages for load in stage.loads}
    found, results = set(), 0
    for stage in stages:
        if stage.reduction is None or stage.buffer in read or stage.dtype == "bool":
            continue
        fits = 4 * machine.lanes <= stage.size <= _MOST_RESULTS - results
        deep = _LEAST_DEPTH * machine.cores <= stage.depth <= 32 * LONGEST
        if fits and deep and columns_of(kernel, stored, stage) is not None:
            found.add(stage.buffer)
            results += stage.size
    return found


def parts_of(members: Sequence[Member], machine: Machine, wanted: int) -> int:
    """Into how many parts the rows are cut, of which each has results of its own."""
    depths = [m.stage.depth for m in members if m.down]
    if not depths:
        return wanted
    most = max(machine.cores, min(depths) // _LEAST_DEPTH)
    return max(min(wanted, most), -(-max(depths) // LONGEST))


@dataclass(frozen=True)
class DownSum:
    """The results of ``stage`` in each of ``parts`` parts of the rows, one part behind another."""

    stage: KernelStage
    buffer: Buffer
    parts: int
    lanes: int
    room: tirx.Stmt

    @classmethod
    def of(cls, stage: KernelStage, parts: int, machine: Machine) -> DownSum:
        """One for as many parts of the rows."""
        buffer, room = allocate([parts * stage.size], stage.dtype, f"{stage.name}_parts")
        return cls(stage, buffer, parts, power_of_two_below(machine.lanes), room)

    def begin(self, part: Expr) -> tirx.Stmt:
        """Return what makes the results of a part ready."""
        assert self.stage.reduction is not None
        init, origin = self.stage.reduction.init, part * integer(self.stage.size)

        def clear(base: Expr, _: Expr | None) -> list[tirx.Stmt]:
            def one(lane: Expr) -> list[tirx.Stmt]:
                return [stored_at(self.buffer, init, origin + base + lane)]

            return [vector_loop(self.lanes, one)]

        return over_vectors(self.stage.size, self.lanes, clear)

    def add(
        self, evaluator: Evaluator, part: Expr, offset: Expr, element: Expr, fresh: Expr | None
    ) -> None:
        """Combine ``element`` with the result at ``offset``, where it is ``fresh`` if given."""
        assert self.stage.reduction is not None
        place = part * integer(self.stage.size) + offset
        old = evaluator.name(load(self.buffer, place), "old")
        new = self.stage.reduction.combine(old, evaluator.name(element, "element"))
        if fresh is not None:
            new = tirx.Select(fresh, new, old)
        evaluator.statements.append(stored_at(self.buffer, new, place))

    def end(self, memory: Memory, fork: Callable[[Lane], Evaluator]) -> list[tirx.Stmt]:
        """Return what combines the parts."""
        return combine_parts(self.stage, self.buffer, self.parts, self.lanes, memory, fork)
