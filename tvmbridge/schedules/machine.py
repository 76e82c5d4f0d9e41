"""What the schedules need to know of a machine, and when a parallel loop pays."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.target import Target

from tvmbridge.core.decisions import Rule, decided
from tvmbridge.schedules.target import core_count, vector_bits

# Expression nodes evaluated in about the time that a parallel launch costs.
_PARALLEL_WORK = 500_000
_LONGEST_ROW = 16384


@dataclass(frozen=True)
class Machine:
    """``lanes`` float32 elements fit a vector register; ``cores`` share a parallel loop.

    A map of at most ``cheap`` nodes is computed wherever it is read; where nothing is reduced,
    one of ``cheap_without_reductions``. A row longer than ``longest_row`` is not left to one core
    while others have none. ``merges``: several kernels may become one nest. Then reductions over
    rows are made beside what else is done with each row, and rows may end within an axis.
    """

    lanes: int
    cores: int
    cheap: int = 5
    cheap_without_reductions: int = 5
    longest_row: int | None = None
    merges: bool = False

    @staticmethod
    def of(target: Target) -> Machine:
        """Return what ``target`` says of itself."""
        lanes, cores = vector_bits(target) // 32, core_count(target)
        return Machine(lanes, cores, longest_row=_LONGEST_ROW, merges=True)

    def chunks(self, work: int, steps: int) -> int:
        """Return into how many parallel parts to cut ``steps`` steps of ``work`` nodes in all."""
        if self.cores == 1:
            return 1
        wanted = max(1, min(steps, 4 * self.cores)) if work >= _PARALLEL_WORK else 1
        return decided(Rule.MIDDLE, lambda: wanted)
