"""Speed trials on a clock that only sleeping moves, and functions that make one side sleep."""

from __future__ import annotations

from typing import Any

import pytest

from tvmbridge.runtime import module_code, speed_trial, timed_path
from tvmbridge.runtime.module_code import ModuleCode

SECONDS = 0.03


class Clock:
    """A clock that only sleeping moves, so that verdicts do not depend on the machine's load."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6  # a call takes no less
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


CLOCK = Clock()


@pytest.fixture
def timed_by_sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time calls by :data:`CLOCK`."""
    monkeypatch.setenv("TVMBRIDGE_ONLY_IF_FASTER", "1")
    for timing in (speed_trial, timed_path, module_code):
        monkeypatch.setattr(timing, "time", CLOCK)
    monkeypatch.setattr(speed_trial, "_switches", lambda: 0)


def slow_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the module's own forward sleep, so that compiled code is faster."""
    genuine = ModuleCode.run_own

    def run_own(code: ModuleCode, arguments: Any) -> Any:
        CLOCK.sleep(SECONDS)
        return genuine(code, arguments)

    monkeypatch.setattr(ModuleCode, "run_own", run_own)
