"""Races of kernels: how often candidates run, by a clock that they turn themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from tvmbridge.kernels.choice import ENOUGH_SECONDS, race


def _runs(
    seconds: Sequence[float], monkeypatch: pytest.MonkeyPatch, enough: float = ENOUGH_SECONDS
) -> int:
    """Race candidates that take so many seconds; return the number of rounds."""
    now, rounds = [0.0], [0]

    def taking(spent: float) -> Callable[[], None]:
        def run() -> None:
            now[0] += spent
            rounds[0] += 1

        return run

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert race([taking(s) for s in seconds], enough) == pytest.approx(list(seconds))
    return rounds[0] // len(seconds)


@pytest.mark.parametrize(
    ("seconds", "rounds"),
    [
        pytest.param([0.020, 0.021], 4, id="close and long"),
        pytest.param([0.020, 0.040], 2, id="clear and long"),
        pytest.param([0.010, 0.020, 0.0105], 4, id="the second is close"),
        pytest.param([0.001, 0.0011], 15, id="close and short"),
        pytest.param([0.001, 0.002], 3, id="clear and short"),
        pytest.param([1e-6, 1e-6], 40, id="a few microseconds"),
        pytest.param([0.2, 0.21], 1, id="very long"),
    ],
)
def test_a_clear_lead_ends_a_race(
    seconds: list[float], rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _runs(seconds, monkeypatch) == rounds


def test_a_race_may_have_fewer_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _runs([0.001, 0.0011], monkeypatch, enough=0.01) == 5
