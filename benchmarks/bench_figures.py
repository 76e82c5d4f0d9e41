"""Each measurement as a test, for ``make bench``: a test fails if a bound does not hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from benchmarks import (
    accuracy,
    call_cost,
    compile_time,
    memory,
    peak_memory,
    residuals,
    speed,
)

MEASUREMENTS = {
    "accuracy": accuracy.main,
    "speed": speed.main,
    "compile_time": compile_time.main,
    "call_cost": call_cost.main,
    "memory": memory.main,
    "peak_memory": peak_memory.main,
    "residuals": residuals.main,
}


@pytest.mark.bench
@pytest.mark.parametrize("main", MEASUREMENTS.values(), ids=MEASUREMENTS)
def test_bounds_hold(main: Callable[[Sequence[str]], int]) -> None:
    assert main([]) == 0
