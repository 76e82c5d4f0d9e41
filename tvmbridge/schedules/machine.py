"""The properties of a machine that schedules depend on, and when a parallel loop pays."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.target import Target

from tvmbridge.core.decisions import Rule, decided
from tvmbridge.schedules.target import core_count, vector_bits

# About as many expression nodes are evaluated in the time that a parallel launch costs.
_PARALLEL_WORK = 500_000
_LONGEST_ROW = 16384


@dataclass(frozen=True)
class Machine:
    """The properties of a machine that schedules depend on.

    - ``lanes``: the number of float32 elements in a vector register.
    - ``cores``: the number of cores that share a parallel loop.
    - ``cheap``: an elementwise stage of at most this many expression nodes is recomputed at each
      read instead of stored, if the kernel has reductions.
    - ``cheap_without_reductions``: the same limit for kernels without reductions.
    - ``longest_row``: a longer row is not left to one core while others are idle; None: no limit.
    - ``merges``: whether stages of several kernels may share a loop nest. Then reductions over the
      rows may join other stages, and rows may end inside an axis.
    """

    lanes: int
    cores: int
    cheap: int = 5
    cheap_without_reductions: int = 5
    longest_row: int | None = None
    merges: bool = False

    @staticmethod
    def of(target: Target) -> Machine:
        """Return the machine that ``target`` describes."""
        lanes, cores = vector_bits(target) // 32, core_count(target)
        return Machine(lanes, cores, longest_row=_LONGEST_ROW, merges=True)

    def chunks(self, work: int, steps: int) -> int:
        """Return the number of parallel parts for a loop; 1 if the work is too small to share.

        Args:
            work: the number of expression nodes that the whole loop evaluates.
        """
        if self.cores == 1:
            return 1
        wanted = max(1, min(steps, 4 * self.cores)) if work >= _PARALLEL_WORK else 1
        return decided(Rule.MIDDLE, lambda: wanted)
