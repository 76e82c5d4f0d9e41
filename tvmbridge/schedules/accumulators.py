"""Accumulators for reductions over a row, with one partial result in each vector lane.

One long sum has larger rounding errors than many short ones. So a long row is cut into stretches of
256 steps. After each stretch the partial results are added to totals and reset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr

from tvmbridge.core.decisions import Rule, decided, sizes_vary
from tvmbridge.schedules.indexing import integer
from tvmbridge.schedules.kernel import KernelStage, Reduction
from tvmbridge.schedules.loops import (
    Body,
    allocate,
    combine_lanes,
    load,
    loop,
    rounded_up,
    store,
    vector_loop,
)
from tvmbridge.schedules.reader import Buffer

# Steps of a stretch: the number of elements that a lane adds before it adds to its total.
_STRETCH = 256


@dataclass(frozen=True)
class Accumulator:
    """The partial results of one reduction.

    - ``stage``, ``reduction``: the reduction.
    - ``buffer``: the partial results of the current stretch, one for each lane.
    - ``totals``: the combined results of all stretches; ``buffer`` itself if there is only one.
    - ``lanes``: the number of lanes.
    - ``allocations``: the statements that allocate the buffers.
    """

    stage: KernelStage
    reduction: Reduction
    buffer: Buffer
    totals: Buffer
    lanes: int
    allocations: tuple[tirx.Stmt, ...]

    @classmethod
    def of(cls, stage: KernelStage, lanes: int, steps: int) -> Accumulator:
        """Create an accumulator of ``lanes`` lanes for a pass of ``steps`` steps."""
        assert stage.reduction is not None
        buffer, room = allocate([lanes], stage.dtype, f"{stage.name}_lanes")
        if not decided(Rule.MOST, lambda: steps >= 2 * _STRETCH):
            return cls(stage, stage.reduction, buffer, buffer, lanes, (room,))
        totals, more = allocate([lanes], stage.dtype, f"{stage.name}_totals")
        return cls(stage, stage.reduction, buffer, totals, lanes, (room, more))

    @property
    def stretched(self) -> bool:
        """Whether the pass has several stretches."""
        return self.totals is not self.buffer

    def begin(self) -> list[tirx.Stmt]:
        """Return the statements that allocate the buffers and clear the totals."""
        return [*self.allocations, self._clear(self.totals)]

    def _clear(self, buffer: Buffer) -> tirx.Stmt:
        init = self.reduction.init
        return vector_loop(self.lanes, lambda lane: [store(buffer, init, lane)])

    def begin_stretch(self) -> tirx.Stmt:
        """Return the statement that clears the partial results before a stretch."""
        return self._clear(self.buffer)

    def end_stretch(self) -> tirx.Stmt:
        """Return the statement that adds the partial sums of one block of steps to the totals.

        A block of steps has accumulators of its own, so that rounding errors grow more slowly.
        """

        def add(lane: Expr) -> list[tirx.Stmt]:
            both = self.reduction.combine(load(self.totals, lane), load(self.buffer, lane))
            return [store(self.totals, both, lane)]

        return vector_loop(self.lanes, add)

    def end(self) -> list[tirx.Stmt]:
        """Return the statements that combine the lanes into lane 0."""
        return combine_lanes(self.totals, self.lanes, self.reduction)

    def result(self) -> Expr:
        """Return the expression that reads the result, after the statements of :meth:`end`."""
        return load(self.totals, integer(0))


def in_stretches(
    accumulators: Sequence[Accumulator],
) -> Callable[[int | Expr, Body], tirx.Stmt]:
    """Return a function that builds the loop of a pass from its number of steps and its body.

    The function builds a plain loop, or a loop over stretches if an accumulator needs them.
    """
    stretched = [a for a in accumulators if a.stretched]
    if not stretched:
        return loop

    def nested(steps: int | Expr, body: Body) -> tirx.Stmt:
        whole = isinstance(steps, int) and not sizes_vary() and steps % _STRETCH == 0

        def stretch(number: Expr) -> list[tirx.Stmt]:
            start = number * integer(_STRETCH)
            left = (integer(steps) if isinstance(steps, int) else steps) - start
            count = tirx.Min(integer(_STRETCH), left)
            return [
                *(a.begin_stretch() for a in stretched),
                loop(_STRETCH if whole else count, body, start=start),
                *(a.end_stretch() for a in stretched),
            ]

        return loop(rounded_up(steps, _STRETCH), stretch)

    return nested
