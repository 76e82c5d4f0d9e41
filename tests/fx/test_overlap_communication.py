"""OverlapCommunication between processes: equal results, one order, and errors, not hangs."""

from __future__ import annotations

import pytest

from tests.fx.ranks import run_ranks

pytestmark = pytest.mark.timeout(900)

DIFFERENCES = {
    "more: PassError": "rank 0 has 2, rank 1 has 3",
    "kind: PassError": "number 1 is all_reduce(sumfloat32) on rank 0, all_reduce(maxfloat32) on",
    "cannot: ": "",
}


def run(world: int, first: int, count: int, limit: float) -> None:
    """Check random modules, ranks with different collectives, and the death of the last rank."""
    found = run_ranks(world, first, count, limit)
    assert found[-1][0] == 7, found[-1][1]
    for status, text in found[:-1]:
        assert status == 0, text
        assert f"told: a collective failed: rank {world - 1} has ended" in text, text
    for _, text in found:
        assert "agreed" in text
        for what, message in DIFFERENCES.items():
            (line,) = [line for line in text.splitlines() if line.startswith(what)]
            assert message in line, text
            assert "nothing" not in line


@pytest.mark.slow
def test_two_ranks() -> None:
    run(2, 0, 2, 200.0)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "count"), [(2, 100), (4, 30)])
def test_many_random_modules(world: int, count: int) -> None:
    run(world, 1000, count, 800.0)


@pytest.mark.slow
def test_one_rank() -> None:
    ((status, text),) = run_ranks(1, 1000, 10, 400.0)
    assert status == 0, text
