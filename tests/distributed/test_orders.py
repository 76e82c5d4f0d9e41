"""Schedules as data, and their predicted times."""

from __future__ import annotations

import pytest

from tvmbridge.distributed.orders import (
    SCHEDULES,
    Durations,
    Orders,
    Work,
    engine_class,
    most_in_flight,
    orders,
    predict,
    problem,
)


def written(order: Orders) -> list[str]:
    return [" ".join(f"{w.kind}{w.microbatch}" for w in works) for works in order]


def test_simple_runs_all_forwards_first() -> None:
    assert written(orders("simple", 2, 2, 3)) == ["F0 F1 F2 B0 B1 B2"] * 2


def test_interleaved_runs_backward_as_soon_as_it_can() -> None:
    assert written(orders("interleaved", 2, 2, 4)) == [
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "ranks"), [(2, 2), (4, 4), (4, 2), (2, 1), (1, 1), (8, 4)])
def test_each_piece_of_work_is_there_once(schedule: str, stages: int, ranks: int) -> None:
    found = [w for works in orders(schedule, stages, ranks, 8) for w in works]
    forwards = {(w.stage, w.microbatch) for w in found if w.kind == "F"}
    assert forwards == {(s, m) for s in range(stages) for m in range(8)}
    whole = [(w.stage, w.microbatch) for w in found if w.kind == "B"]
    halves = [(w.stage, w.microbatch) for w in found if w.kind == "I"]
    assert sorted(whole + halves) == sorted(forwards)
    assert sorted(halves) == sorted((w.stage, w.microbatch) for w in found if w.kind == "W")
    predict(orders(schedule, stages, ranks, 8), [Durations(1, 2)] * stages)


@pytest.mark.parametrize("schedule", ["simple", "interleaved"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (2, 16), (4, 8), (4, 16), (3, 5)])
def test_the_bubble_is_that_of_the_theory(schedule: str, ranks: int, microbatches: int) -> None:
    timeline = predict(orders(schedule, ranks, ranks, microbatches), [Durations(1, 2)] * ranks)
    theory = (ranks - 1) / (microbatches + ranks - 1)
    assert timeline.idle == pytest.approx(theory, abs=1e-12)
    assert timeline.seconds == pytest.approx(3 * (microbatches + ranks - 1))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 8), (4, 16)])
def test_two_stages_a_device_have_a_smaller_bubble(ranks: int, microbatches: int) -> None:
    one = predict(orders("interleaved", ranks, ranks, microbatches), [Durations(2, 4)] * ranks)
    two = predict(
        orders("interleaved", 2 * ranks, ranks, microbatches), [Durations(1, 2)] * 2 * ranks
    )
    assert two.idle < one.idle - 0.02
    zero = predict(
        orders("zero_bubble", 2 * ranks, ranks, microbatches), [Durations(1, 2)] * 2 * ranks
    )
    assert zero.idle < two.idle


def test_fewer_microbatches_than_stages_run_all_forwards_first() -> None:
    assert orders("interleaved", 4, 4, 3) == orders("simple", 4, 4, 3)
    kinds = [engine_class("interleaved", 4, 4, count).__name__ for count in (3, 4)]
    assert kinds == ["ScheduleGPipe", "Schedule1F1B"]


def test_a_transfer_delays_what_waits_for_it() -> None:
    durations = [Durations(1, 1, 0.5), Durations(1, 1)]
    spans = predict(orders("simple", 2, 2, 1), durations).spans
    times = {str(s.work): (s.start, s.end) for rank in spans for s in rank}
    assert times == {"F0.0": (0, 1), "F1.0": (1.5, 2.5), "B1.0": (2.5, 3.5), "B0.0": (4, 5)}


def test_an_order_that_waits_for_itself_is_noticed() -> None:
    order = ((Work("B", 0, 0), Work("F", 0, 0)),)
    with pytest.raises(ValueError, match="waits for itself"):
        predict(order, [Durations(1, 1)])


def test_activations_in_flight() -> None:
    assert most_in_flight(orders("simple", 4, 4, 16), 4) == [16] * 4
    assert most_in_flight(orders("interleaved", 4, 4, 16), 4) == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("fast", 2, 2, 4), "choose one of simple, interleaved, zero_bubble"),
        (("simple", 3, 2, 4), "3 stages on 2 devices; choose a multiple: 2, 4"),
        (("interleaved", 4, 2, 5), "2, 3, 4, 6 would fit"),
    ],
)
def test_what_the_engine_lacks_is_said(arguments: tuple[str, int, int, int], text: str) -> None:
    assert text in (problem(*arguments) or "")
    assert problem("interleaved", 4, 2, 4) is None
