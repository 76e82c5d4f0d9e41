"""Reductions over the rows of a loop nest, computed in the same pass as other stages of the rows.

Each parallel part of the rows has partial results of its own, which are combined after all parts.
For example, the gradients of a norm's weights are computed in the pass over its input's gradient.
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

# The most results of all such reductions in a kernel, so that they stay in the second-level cache.
_MOST_RESULTS = 32768
# The fewest rows of a part: with fewer, clearing and combining the results takes longer.
_LEAST_DEPTH = 16


def down_buffers(
    kernel: Kernel, stored: set[Any], stages: Sequence[KernelStage], machine: Machine
) -> set[Any]:
    """Return the results of reductions that may run in the same pass as other stages of the rows.

    Such a reduction goes down contiguous columns, has few results, and no stage reads them.
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
    """Return the number of parallel parts of the rows: ``wanted``, unless rows are reduced.

    For reductions over the rows, a part has partial results of its own and needs enough rows. It
    has at most ``LONGEST`` rows, so that sums stay short.
    """
    depths = [m.stage.depth for m in members if m.down]
    if not depths:
        return wanted
    most = max(machine.cores, min(depths) // _LEAST_DEPTH)
    return max(min(wanted, most), -(-max(depths) // LONGEST))


@dataclass(frozen=True)
class DownSum:
    """The partial results of a reduction over the rows.

    - ``stage``: the reduction.
    - ``buffer``: the results of each part, one part after the other.
    - ``parts``: the number of parts of the rows.
    - ``lanes``: the number of vector lanes.
    - ``room``: the statement that allocates ``buffer``.
    """

    stage: KernelStage
    buffer: Buffer
    parts: int
    lanes: int
    room: tirx.Stmt

    @classmethod
    def of(cls, stage: KernelStage, parts: int, machine: Machine) -> DownSum:
        """Create the partial results of ``stage`` for ``parts`` parts of the rows."""
        buffer, room = allocate([parts * stage.size], stage.dtype, f"{stage.name}_parts")
        return cls(stage, buffer, parts, power_of_two_below(machine.lanes), room)

    def begin(self, part: Expr) -> tirx.Stmt:
        """Return the statement that clears the results of a part."""
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
        """Add the statements to ``evaluator`` that combine ``element`` with a part's result.

        Args:
            fresh: the condition that the element was not added by an overlapping vector before;
                None if vectors do not overlap.
        """
        assert self.stage.reduction is not None
        place = part * integer(self.stage.size) + offset
        old = evaluator.name(load(self.buffer, place), "old")
        new = self.stage.reduction.combine(old, evaluator.name(element, "element"))
        if fresh is not None:
            new = tirx.Select(fresh, new, old)
        evaluator.statements.append(stored_at(self.buffer, new, place))

    def end(self, memory: Memory, fork: Callable[[Lane], Evaluator]) -> list[tirx.Stmt]:
        """Return the statements that combine the parts."""
        return combine_parts(self.stage, self.buffer, self.parts, self.lanes, memory, fork)
