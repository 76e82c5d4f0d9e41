"""Sample shapes for symbolic code: they must differ in all remainders of sizes and their sums."""

from __future__ import annotations

import itertools

import pytest

from tvmbridge.symbolic.probes import points_for


@pytest.mark.parametrize("smallest", [(2,), (3,), (8,), (40,), (4, 9), (2, 9, 30)])
@pytest.mark.parametrize("most", [60, 100, 1 << 20])
def test_remainders_of_sums_of_sizes_differ(smallest: tuple[int, ...], most: int) -> None:
    points = points_for(smallest, tuple(n + 3 for n in smallest), [most] * len(smallest))
    assert points is not None
    for divisor in (2, 3, 4, 5, 6, 7, 8, 12, 16):
        for factors in itertools.product(range(divisor), repeat=len(smallest)):
            found = {
                sum(f * n for f, n in zip(factors, point, strict=True)) % divisor
                for point in points.all
            }
            assert len(found) > 1 or not any(factors), (points.all, divisor, factors)
