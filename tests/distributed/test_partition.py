"""The search for a cut, compared with all cuts and with cuts by hand."""

from __future__ import annotations

import random

import pytest

from tvmbridge.core.errors import PipelineError
from tvmbridge.distributed import partition
from tvmbridge.distributed.measuring import PartCost
from tvmbridge.distributed.orders import orders
from tvmbridge.distributed.partition import DeviceLimits, Search

FREE = DeviceLimits(latency=0.0, bandwidth=1e30)


def costs(times: list[float], kept: int = 0, parameters: int = 0) -> list[PartCost]:
    return [PartCost(t, 2 * t, parameters, kept, 8) for t in times]


def search(times: list[float], stages: int, machine: DeviceLimits = FREE, **kwargs: int) -> Search:
    return Search(costs(times, **kwargs), orders("interleaved", stages, stages, 8), stages, machine)


def test_equal_parts_are_shared_out_evenly() -> None:
    assert search([1.0] * 8, 4).best().starts == (0, 2, 4, 6)


def test_a_long_part_stands_alone() -> None:
    assert search([1, 1, 1, 6, 1, 1], 3).best().starts == (0, 3, 4)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("stages", [2, 4])
def test_the_search_is_within_five_percent_of_the_best(
    seed: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check models of 16 blocks with random durations, for which the search skips some cuts."""
    drawn = random.Random(seed)
    times = [drawn.uniform(0.2, 3) for _ in range(16)]
    every = search(times, stages)
    best = min(p.seconds for s in every.every() if (p := every.evaluate(s)) is not None)
    assert every.best().seconds == best
    monkeypatch.setattr(partition, "_ALL_TRIED", 0)
    assert search(times, stages).best().seconds <= 1.05 * best


def test_memory_moves_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a memory limit: the first stage holds two micro-batches at once, the second one."""
    even = search([1.0] * 6, 2, kept=100)
    assert even.best().starts == (0, 3)
    assert even.best().memory == (2 * 308, 308)
    tight = DeviceLimits(FREE.latency, FREE.bandwidth, memory=500)
    assert search([1.0] * 6, 2, tight, kept=100).best().starts == (0, 2)
    monkeypatch.setattr(partition, "_ALL_TRIED", 0)
    assert search([1.0] * 6, 2, tight, kept=100).best().starts == (0, 2)


def test_what_fits_nowhere_is_said_with_what_would() -> None:
    tight = DeviceLimits(FREE.latency, FREE.bandwidth, memory=10)
    with pytest.raises(PipelineError, match=r"fits 10 bytes a device; the smallest need \d+"):
        search([1.0] * 6, 2, tight, kept=100).best()


@pytest.mark.parametrize("all_tried", [0, 3000])
def test_pinned_parts_stay(all_tried: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "_ALL_TRIED", all_tried)
    order = orders("interleaved", 2, 2, 8)
    assert Search(costs([1.0] * 6), order, 2, FREE, {1: 1}).best().starts == (0, 1)
    assert Search(costs([1.0] * 6), order, 2, FREE, {4: 0}).best().starts == (0, 5)
    with pytest.raises(PipelineError, match="keeps to the modules that are pinned"):
        Search(costs([1.0] * 6), order, 2, FREE, {1: 1, 4: 0}).best()


def test_more_stages_than_parts() -> None:
    with pytest.raises(PipelineError, match="4 stages, but the module can be cut into 3 parts"):
        search([1.0] * 3, 4).best()


def test_a_slow_link_is_counted() -> None:
    """Check that over a slow link the search prefers a cut that few bytes cross."""
    parts = [PartCost(1, 2, 0, 0, 1000 if i == 3 else 10) for i in range(6)]
    order = orders("simple", 2, 2, 4)
    assert Search(parts, order, 2, FREE).best().starts == (0, 3)
    slow = DeviceLimits(latency=0.0, bandwidth=20.0)
    assert Search(parts, order, 2, slow).best().starts != (0, 3)
