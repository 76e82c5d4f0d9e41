"""Partial results of the reductions of a pass over a row, one a vector lane.

One long sum rounds worse than many short ones. Where a row is long its partial results are added
to totals after each stretch of it, and begun anew.
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

# Steps of a stretch: what a lane adds up before its total is touched.
_STRETCH = 256


@dataclass(frozen=True)
class Accumulator:
    """The partial results of ``stage`` in ``buffer``, and those of all stretches in ``totals``.

    ``totals`` is ``buffer`` where the row is one stretch.
    """

    stage: KernelStage
    reduction: Reduction
    buffer: Buffer
    totals: Buffer
    lanes: int
    allocations: tuple[tirx.Stmt, ...]

    @classmethod
    def of(cls, stage: KernelStage, lanes: int, steps: int) -> Accumulator:
        """One of ``lanes`` lanes for a pass of ``steps`` steps."""
        assert stage.reduction is not None
        buffer, room = allocate([lanes], stage.dtype, f"{stage.name}_lanes")
        if not decided(Rule.MOST, lambda: steps >= 2 * _STRETCH):
            return cls(stage, stage.reduction, buffer, buffer, lanes, (room,))
        totals, more = allocate([lanes], stage.dtype, f"{stage.name}_totals")
        return cls(stage, stage.reduction, buffer, totals, lanes, (room, more))

    @property
    def stretched(self) -> bool:
        """Whether there are several stretches."""
        return self.totals is not self.buffer

    def begin(self) -> list[tirx.Stmt]:
        """Return what makes the accumulator ready."""
        return [*self.allocations, self._clear(self.totals)]

    def _clear(self, buffer: Buffer) -> tirx.Stmt:
        init = self.reduction.init
        return vector_loop(self.lanes, lambda lane: [store(buffer, init, lane)])

    def begin_stretch(self) -> tirx.Stmt:
        """Return what makes the partial results ready for a stretch."""
        return self._clear(self.buffer)

    def end_stretch(self) -> tirx.Stmt:
        """Return what combines the partial results of a stretch with the totals."""

        def add(lane: Expr) -> list[tirx.Stmt]:
            both = self.reduction.combine(load(self.totals, lane), load(self.buffer, lane))
            return [store(self.totals, both, lane)]

        return vector_loop(self.lanes, add)

    def end(self) -> list[tirx.Stmt]:
        """Return what combines the lanes."""
        return combine_lanes(self.totals, self.lanes, self.reduction)

    def result(self) -> Expr:
        """The result, when all is combined."""
        return load(self.totals, integer(0))


def in_stretches(
    accumulators: Sequence[Accumulator],
) -> Callable[[int | Expr, Body], tirx.Stmt]:
    """Return what makes the loop of a pass with these accumulators, of the number of its steps."""
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
