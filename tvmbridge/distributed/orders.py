"""Which rank does what in which order, and what that takes: schedules as data.

The orders are the engine's own. A :class:`Timeline` is such an order with times, predicted from
durations or as measured.
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
    """A piece of work: ``kind`` F for forward, B for backward (I its inputs, W its weights)."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


Orders = tuple[tuple[Work, ...], ...]


def engine_class(schedule: str, stages: int, ranks: int, microbatches: int) -> Any:
    """The engine's class for a schedule of ``stages`` on ``ranks`` devices."""
    several = stages > ranks
    if schedule == "simple" or _is_short(schedule, stages, ranks, microbatches):
        return pipelining.ScheduleLoopedBFS if several else pipelining.ScheduleGPipe
    if schedule == "interleaved":
        return pipelining.ScheduleInterleaved1F1B if several else pipelining.Schedule1F1B
    return pipelining.ScheduleInterleavedZeroBubble


def _is_short(schedule: str, stages: int, ranks: int, microbatches: int) -> bool:
    """Has the first stage all forwards before its first backward, whatever the schedule?

    The engine's 1F1B is of no use then, and hangs with NCCL: one rank sends in a batch with what it
    receives, the other receives alone, and these are different connections.
    """
    return schedule == "interleaved" and stages == ranks and microbatches < stages


def problem(schedule: str, stages: int, ranks: int, microbatches: int) -> str | None:
    """Why the engine has no such schedule, in words, with what would fit."""
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
    """What each rank does, in order."""
    alone = schedule == "simple" and stages == ranks
    if alone or _is_short(schedule, stages, ranks, microbatches):
        return tuple(tuple(_all_forwards_first(r, microbatches)) for r in range(ranks))
    if schedule == "interleaved" and stages == ranks:
        return tuple(tuple(_one_by_one(r, stages, microbatches)) for r in range(ranks))
    found = []
    for rank in range(ranks):
        # The engine writes the orders of all ranks down when it is given stages, and asks them
        # only how many there are.
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
    """A piece of work and when it ran, in seconds."""

    work: Work
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What each rank did when; ``spans[rank]`` in order."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        all_spans = [s for rank in self.spans for s in rank]
        return max(s.end for s in all_spans) - min(s.start for s in all_spans)

    @property
    def idle(self) -> float:
        """The share of the devices' time in which they do nothing."""
        busy = sum(s.end - s.start for rank in self.spans for s in rank)
        return 1 - busy / (self.seconds * len(self.spans))


@dataclass(frozen=True)
class Durations:
    """Seconds of a stage for one micro-batch, and of sending what crosses the cut behind it."""

    forward: float
    backward: float
    transfer: float = 0.0

    def of(self, kind: str) -> float:
        """The seconds of a piece of work; a backward in two halves is taken to be halved."""
        return {"F": self.forward, "B": self.backward}.get(kind, self.backward / 2)


def predict(plan: Orders, durations: Sequence[Durations]) -> Timeline:
    """When each piece of work runs if each rank does the next as soon as it can.

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
    """When what the work needs is there; None as long as some of it has not been planned."""
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
    """Of how many micro-batches each stage keeps what backward needs, at most."""
    most = [0] * stages
    now = [0] * stages
    for works in plan:
        for kind, stage, _ in works:
            now[stage] += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
            most[stage] = max(most[stage], now[stage])
    return most
