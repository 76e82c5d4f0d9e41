"""Choose the parts of each stage: the cut with the shortest step that fits the memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tvmbridge.core.errors import PipelineError
from tvmbridge.distributed.measuring import PartCost
from tvmbridge.distributed.orders import Durations, Orders, most_in_flight, predict

# Up to this number of cuts all are tried; otherwise the search begins at the best balance.
_ALL_TRIED = 3000
_LONGEST_SEARCH = 200


@dataclass(frozen=True)
class DeviceLimits:
    """What the search assumes of the devices and of their connections.

    - ``latency``: seconds.
    - ``bandwidth``: bytes a second.
    - ``memory``: bytes per device; None for no limit.
    - ``state``: the memory of a parameter over its size. The default counts the parameter, its
      gradient, and the two moments of Adam.
    """

    latency: float
    bandwidth: float
    memory: int | None = None
    state: float = 4.0


@dataclass(frozen=True)
class Partition:
    """A cut of the parts into stages, with its predicted cost.

    - ``starts``: the number of the part that begins each stage; the first is 0.
    - ``durations``: the times of each stage.
    - ``memory``: bytes of each rank.
    - ``seconds``: the predicted time of a step.
    """

    starts: tuple[int, ...]
    durations: tuple[Durations, ...]
    memory: tuple[int, ...]  # of each rank
    seconds: float


class Search:
    """Finds the best cut of parts into stages; ``allowed[part]`` is the stage of a pinned part."""

    def __init__(
        self,
        costs: Sequence[PartCost],
        plan: Orders,
        stages: int,
        machine: DeviceLimits,
        allowed: Mapping[int, int] | None = None,
    ) -> None:
        self.costs = costs
        self.plan = plan
        self.stages = stages
        self.machine = machine
        self.pinned = dict(allowed or {})
        self.in_flight = most_in_flight(plan, stages)
        self.rank_of = {w.stage: rank for rank, works in enumerate(plan) for w in works}

    def best(self) -> Partition:
        """Return the cut with the shortest predicted step.

        Raises:
            PipelineError: no cut keeps the pinned parts in their stages, or none fits the memory.
        """
        parts = len(self.costs)
        if parts < self.stages:
            raise PipelineError(
                f"{self.stages} stages, but the module can be cut into {parts} parts at most"
            )
        if math.comb(parts - 1, self.stages - 1) <= _ALL_TRIED:
            tried = [p for s in self.every() if (p := self.evaluate(s)) is not None]
            if tried:
                return min(tried, key=lambda p: p.seconds)
        else:
            found = self._improved(self._balanced())
            if found is not None:
                return found
        raise PipelineError(self._why_none())

    def every(self) -> Iterator[tuple[int, ...]]:
        """Yield all cuts that keep the pinned parts in their stages."""
        for inner in itertools.combinations(range(1, len(self.costs)), self.stages - 1):
            starts = (0, *inner)
            if self._keeps(starts):
                yield starts

    def _keeps(self, starts: Sequence[int]) -> bool:
        ends = [*starts[1:], len(self.costs)]
        return all(starts[s] <= part < ends[s] for part, s in self.pinned.items())

    def evaluate(self, starts: Sequence[int], *, fitting: bool = True) -> Partition | None:
        """Return the cut with its times; None if it does not fit the memory."""
        ends = [*starts[1:], len(self.costs)]
        stages = [self.costs[a:b] for a, b in zip(starts, ends, strict=True)]
        memory = [0] * len(self.plan)
        for i, parts in enumerate(stages):
            kept = sum(p.kept for p in parts) + parts[0].received
            held = self.machine.state * sum(p.parameters for p in parts)
            memory[self.rank_of[i]] += int(held + kept * self.in_flight[i])
        if fitting and self.machine.memory is not None and max(memory) > self.machine.memory:
            return None
        durations = [
            Durations(
                sum(p.forward for p in parts),
                sum(p.backward for p in parts),
                self._transfer(ends[i]),
            )
            for i, parts in enumerate(stages)
        ]
        seconds = predict(self.plan, durations).seconds
        return Partition(tuple(starts), tuple(durations), tuple(memory), seconds)

    def _transfer(self, part: int) -> float:
        if part == len(self.costs):
            return 0.0
        return self.machine.latency + self.costs[part].received / self.machine.bandwidth

    def _balanced(self) -> list[int] | None:
        """Return the cut whose longest stage is shortest, by dynamic programming."""
        times = [p.forward + p.backward for p in self.costs]
        sums = [0.0, *itertools.accumulate(times)]
        parts = len(times)
        # best[n] is the longest stage of the first n parts, and the starts of its stages.
        best = [(0.0, [0])] + [(math.inf, [0])] * parts
        for stage in range(self.stages):
            nxt = [(math.inf, [0])] * (parts + 1)
            for end in range(stage + 1, parts + 1):
                for start in range(stage, end):
                    longest, begun = best[start]
                    length = max(longest, sums[end] - sums[start])
                    if length < nxt[end][0] and self._may(stage, start, end):
                        nxt[end] = (length, [*begun[1:], start] if stage == 0 else [*begun, start])
            best = nxt
        return None if math.isinf(best[parts][0]) else best[parts][1]

    def _may(self, stage: int, start: int, end: int) -> bool:
        return all((start <= part < end) == (s == stage) for part, s in self.pinned.items())

    def _improved(self, starts: list[int] | None) -> Partition | None:
        """Return the best cut that repeated moves of one or two boundaries reach."""
        if starts is None:
            return None
        now, best = starts, self.evaluate(starts)
        for _ in range(_LONGEST_SEARCH):
            tried = [p for s in self._neighbours(now) if (p := self.evaluate(s)) is not None]
            found = min(tried, key=lambda p: p.seconds, default=None)
            if found is None or (best is not None and found.seconds >= best.seconds):
                break
            now, best = list(found.starts), found
        return best

    def _neighbours(self, starts: Sequence[int]) -> Iterator[list[int]]:
        moves = [(i, d) for i in range(1, len(starts)) for d in (-2, -1, 1, 2)]
        for group in (*((m,) for m in moves), *itertools.combinations(moves, 2)):
            moved = list(starts)
            for i, d in group:
                moved[i] += d
            ordered = all(a < b for a, b in itertools.pairwise([*moved, len(self.costs)]))
            if ordered and self._keeps(moved):
                yield moved

    def _why_none(self) -> str:
        loose = [
            self.evaluate(s, fitting=False) for s in itertools.islice(self.every(), _ALL_TRIED)
        ]
        needed = [max(p.memory) for p in loose if p is not None]
        if not needed:
            return f"no cut into {self.stages} stages keeps to the modules that are pinned"
        return (
            f"no cut into {self.stages} stages fits {self.machine.memory} bytes a device; "
            f"the smallest need {min(needed)}"
        )
