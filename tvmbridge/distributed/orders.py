"""Schedules as data: the order of each rank's work, and the times it takes.

The orders come from the engine of torch.distributed.pipelining. A :class:`Timeline` is an order
with times, either predicted from durations or measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.distributed import pipelining

SCHEDULES = ("simple", "interleaved", "zero_bubble")


class Work(NamedTuple):
    """A piece of work: ``kind`` is F for forward, B for backward, I or W for one half of backward.

    I computes the gradients of the inputs, W those of the weights.
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


Orders = tuple[tuple[Work, ...], ...]


def engine_class(schedule: str, stages: int, ranks: int, microbatches: int) -> Any:
    """Return the engine's class for a schedule of ``stages`` on ``ranks`` devices."""
    several = stages > ranks
    if schedule == "simple" or _is_short(schedule, stages, ranks, microbatches):
        return pipelining.ScheduleLoopedBFS if several else pipelining.ScheduleGPipe
    if schedule == "interleaved":
        return pipelining.ScheduleInterleaved1F1B if several else pipelining.Schedule1F1B
    return pipelining.ScheduleInterleavedZeroBubble


def _is_short(schedule: str, stages: int, ranks: int, microbatches: int) -> bool:
    """Whether the first stage runs all forwards before its first backward in any schedule.

    The engine's 1F1B gains nothing then, and hangs with NCCL: one rank sends and receives in one
    batch, the other receives alone, and NCCL uses different connections for the two.
    """
    return schedule == "interleaved" and stages == ranks and microbatches < stages


def problem(schedule: str, stages: int, ranks: int, microbatches: int) -> str | None:
    """Return why the engine has no such schedule and what would fit; None if it has one."""
    if schedule not in SCHEDULES:
        return f"schedule is {schedule!r}; choose one of {', '.join(SCHEDULES)}"
    if stages % ranks:
        fitting = list(range(ranks, stages + ranks + 1, ranks))
        return f"{stages} stages on {ranks} devices; choose a multiple: {_words(fitting)}"
    rounds = max(1, microbatches // ranks)
    looped = (stages > ranks and schedule == "interleaved") or schedule == "zero_bubble"
    if looped and microbatches % rounds:
        fitting = [n for n in range(1, 2 * microbatches) if n % max(1, n // ranks) == 0]
        near = sorted(sorted(fitting, key=lambda n: abs(n - microbatches))[:4])
        return (
            f"{microbatches} micro-batches for {stages} stages on {ranks} devices, which the "
            f"{schedule} schedule cannot take in rounds; {_words(near)} would fit"
        )
    return None


def _words(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def orders(schedule: str, stages: int, ranks: int, microbatches: int) -> Orders:
    """Return the work of each rank, in order."""
    alone = schedule == "simple" and stages == ranks
    if alone or _is_short(schedule, stages, ranks, microbatches):
        return tuple(tuple(_all_forwards_first(r, microbatches)) for r in range(ranks))
    if schedule == "interleaved" and stages == ranks:
        return tuple(tuple(_one_by_one(r, stages, microbatches)) for r in range(ranks))
    found = []
    for rank in range(ranks):
        # The engine computes the orders of all ranks when it gets stages, of which it reads only
        # their number.
        local = [
            SimpleNamespace(
                num_stages=stages,
                group_size=ranks,
                group_rank=rank,
                stage_index=index,
                submod=torch.nn.Identity(),
            )
            for index in range(rank, stages, ranks)
        ]
        kind = engine_class(schedule, stages, ranks, microbatches)
        made = kind(local, microbatches, loss_fn=torch.sum)
        found.append(tuple(_parsed(made.pipeline_order[rank])))
    return tuple(found)


def _parsed(actions: Sequence[Any]) -> Iterator[Work]:
    for action in actions:
        match = re.fullmatch(r"(\d+)([A-Z]+)(\d+)", str(action))
        if match is not None and match[2] in ("F", "B", "I", "W"):
            yield Work(match[2], int(match[1]), int(match[3]))


def _all_forwards_first(rank: int, microbatches: int) -> Iterator[Work]:
    for kind in "FB":
        yield from (Work(kind, rank, m) for m in range(microbatches))


def _one_by_one(rank: int, stages: int, microbatches: int) -> Iterator[Work]:
    ahead = min(microbatches, stages - rank)
    yield from (Work("F", rank, m) for m in range(ahead))
    for m in range(microbatches):
        yield Work("B", rank, m)
        if m + ahead < microbatches:
            yield Work("F", rank, m + ahead)


class Span(NamedTuple):
    """A piece of work, and its start and end in seconds."""

    work: Work
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The work of each rank with its times; ``spans[rank]`` is in order."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def seconds(self) -> float:
        """The seconds from the first start to the last end."""
        all_spans = [s for rank in self.spans for s in rank]
        return max(s.end for s in all_spans) - min(s.start for s in all_spans)

    @property
    def idle(self) -> float:
        """The share of the devices' time in which they are idle."""
        busy = sum(s.end - s.start for rank in self.spans for s in rank)
        return 1 - busy / (self.seconds * len(self.spans))


@dataclass(frozen=True)
class Durations:
    """Seconds of a stage for one micro-batch, and seconds to send its results to the next."""

    forward: float
    backward: float
    transfer: float = 0.0

    def of(self, kind: str) -> float:
        """Return the seconds of a piece of work; each half of backward counts as half of it."""
        return {"F": self.forward, "B": self.backward}.get(kind, self.backward / 2)


def predict(plan: Orders, durations: Sequence[Durations]) -> Timeline:
    """Return the timeline in which each rank starts its next piece of work as soon as it can.

    Raises:
        ValueError: the order waits for itself.
    """
    rank_of = {w.stage: rank for rank, works in enumerate(plan) for w in works}
    ends: dict[Work, float] = {}
    spans: list[list[Span]] = [[] for _ in plan]
    positions = [0] * len(plan)
    left = sum(map(len, plan))
    while left:
        before = left
        for rank, works in enumerate(plan):
            while positions[rank] < len(works):
                work = works[positions[rank]]
                ready = _ready(work, len(durations), ends, rank_of, durations)
                if ready is None:
                    break
                start = max(ready, spans[rank][-1].end if spans[rank] else 0.0)
                end = start + durations[work.stage].of(work.kind)
                spans[rank].append(Span(work, start, end))
                ends[work] = end
                positions[rank] += 1
                left -= 1
        if left == before:
            raise ValueError("the schedule waits for itself")
    return Timeline(tuple(map(tuple, spans)))


def _ready(
    work: Work,
    stages: int,
    ends: Mapping[Work, float],
    rank_of: Mapping[int, int],
    durations: Sequence[Durations],
) -> float | None:
    """Return when the inputs of the work have arrived; None if some of them are not planned yet."""
    kind, stage, m = work
    if kind == "W":
        return ends.get(Work("I", stage, m))
    if kind == "F":
        if stage == 0:
            return 0.0
        needed, cut = Work("F", stage - 1, m), stage - 1
    else:
        own = ends.get(Work("F", stage, m))
        if own is None or stage == stages - 1:
            return own
        needed, cut = Work("B", stage + 1, m), stage
        if needed not in ends:
            needed = Work("I", stage + 1, m)
    if needed not in ends:
        return None
    far = rank_of[needed.stage] != rank_of[stage]
    return ends[needed] + (durations[cut].transfer if far else 0.0)


def most_in_flight(plan: Orders, stages: int) -> list[int]:
    """Return, for each stage, the largest number of micro-batches whose residuals it keeps."""
    most = [0] * stages
    now = [0] * stages
    for works in plan:
        for kind, stage, _ in works:
            now[stage] += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
            most[stage] = max(most[stage], now[stage])
    return most
