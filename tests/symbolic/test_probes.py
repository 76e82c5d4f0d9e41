"""Sample shapes for symbolic code: they must differ in all remainders of sizes and their sums."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tvmbridge.core.errors import CaptureError
from tvmbridge.symbolic import probes
from tvmbridge.symbolic.points import Points
from tvmbridge.symbolic.probes import points_for, points_within
from tvmbridge.symbolic.symbols import Symbols


def _around(
    smallest: tuple[int, ...], largest: tuple[int, ...], bounds: list[int], **options: Any
) -> Points | None:
    return points_for((smallest, largest, largest), bounds, **options)


def test_kernels_are_chosen_at_sizes_of_calls_and_not_at_bounds() -> None:
    points = points_for(((2, 2), (4, 60), (64, 512)), [64, 512])
    assert points is not None
    assert max(points.middle) <= 60
    assert points.hold((60, 450))


def test_sizes_within_a_narrow_bound_reach_those_of_calls() -> None:
    points = points_for(((14,), (18,), (18,)), [20])
    assert points is not None
    assert points.hold((14,))
    assert points.hold((18,))


@pytest.mark.parametrize("smallest", [(2,), (3,), (8,), (40,), (4, 9), (2, 9, 30)])
@pytest.mark.parametrize("most", [60, 100, 1 << 20])
def test_remainders_of_sums_of_sizes_differ(smallest: tuple[int, ...], most: int) -> None:
    points = _around(smallest, tuple(n + 3 for n in smallest), [most] * len(smallest))
    assert points is not None
    for divisor in (2, 3, 4, 5, 6, 7, 8, 12, 16):
        for factors in itertools.product(range(divisor), repeat=len(smallest)):
            found = {
                sum(f * n for f, n in zip(factors, point, strict=True)) % divisor
                for point in points.all
            }
            assert len(found) > 1 or not any(factors), (points.all, divisor, factors)


def test_points_are_no_static_numbers_of_the_graph() -> None:
    free = _around((12,), (40,), [1000])
    assert free is not None
    avoided = {n for (n,) in free.all}
    points = _around((12,), (40,), [1000], avoided=avoided)
    assert points is not None
    assert avoided.isdisjoint(n for (n,) in points.all)


def test_code_is_for_as_small_sizes_whatever_is_avoided() -> None:
    points = _around((8,), (40,), [1000], avoided={3})
    assert points is not None
    assert points.least == (3,)
    others = _around((8,), (40,), [1000], avoided={3}, refused={3})
    assert others is not None
    assert others.least == (7,)


def test_a_bound_that_is_no_prime_leaves_points_below_it() -> None:
    points = _around((4,), (512,), [512])
    assert points is not None
    assert 256 < points.most[0] < 512


@pytest.mark.parametrize("smallest", [(2, 2), (4, 9), (16, 16), (2, 9, 30)])
def test_each_symbol_is_far_larger_and_far_smaller_than_each_other(
    smallest: tuple[int, ...],
) -> None:
    points = _around(smallest, tuple(n + 3 for n in smallest), [1 << 20] * len(smallest))
    assert points is not None
    for i, j in itertools.permutations(range(len(smallest)), 2):
        assert any(point[i] > 8 * point[j] for point in points.all)


def test_a_least_size_that_forward_permits_is_the_smallest_point() -> None:
    points = _around((3, 3), (40, 40), [1000, 1000], floors=[3, 3])
    assert points is not None
    assert points.least == (3, 3)


def test_a_narrow_bound_leaves_points_with_a_smaller_bottom() -> None:
    """No size from 8 to 16 has a generic difference from 5."""
    points = _around((2, 5), (4, 8), [1000, 16], avoided={16})
    assert points is not None
    assert points.least[1] < 5
    assert 8 <= points.most[1] <= 16
    assert len(set(points.all)) == len(points.all)


def test_several_symbols_of_small_sizes_may_have_their_least_size_together() -> None:
    points = _around((3, 4, 3), (5, 6, 5), [1000, 64, 64], avoided={2, 3, 4}, floors=[2, 2, 2])
    assert points is not None
    assert all(map(int.__le__, points.least, (3, 4, 3)))
    assert len(set(points.all)) == len(points.all)


def _points(broken: Any, sizes: tuple[int, ...] = (5,), most: int = 31) -> Any:
    """Return points for tensors of up to ``most`` rows, at which no relation is broken.

    ``sizes`` are the largest rows of calls; ``broken`` gets the rows of all tensors.
    """
    relations = SimpleNamespace(
        is_symbolic=lambda *_: True,
        most=lambda *_: most,
        broken=lambda shapes: "a relation" if broken(*(s[0] for s in shapes.values())) else None,
    )
    trace: Any = SimpleNamespace(
        relations=relations, program=SimpleNamespace(graph=SimpleNamespace(nodes=[]))
    )
    sample = (tuple(torch.empty(n, 2) for n in sizes), {})
    symbols = Symbols(tuple(((i, 0),) for i in range(len(sizes))))
    with mock.patch.object(probes, "traced_sizes", return_value=()):
        smallest = (2,) * len(sizes)
        return points_within(trace, symbols, sample, [smallest], (sizes, sizes), ["x"])


def test_a_single_size_that_forward_leaves_out_is_no_sample_size() -> None:
    """A cache of 32 rows is contiguous up to row 31 + 1 alone."""
    assert _points(lambda rows: False).most == (31,)
    found = _points(lambda rows: rows == 31)
    assert all(5 <= size != 31 for size in found.most)
    with pytest.raises(CaptureError, match="another way at other sizes: a relation"):
        _points(lambda rows: rows > 4)


@pytest.mark.parametrize("sizes", [(9, 5), (5, 9)])
def test_a_size_that_is_at_most_another_one_is_so_at_all_points(sizes: tuple[int, ...]) -> None:
    order = int.__ge__ if sizes[0] > sizes[1] else int.__le__
    points = _points(lambda one, other: not order(one, other), sizes, 1 << 20)
    assert all(order(*point) for point in points.all)
    far = [point for point in points.all if max(point) > 8 * min(point)]
    assert far
    assert points.least == (2, 2)


def test_sizes_in_a_chain_differ_far_from_those_outside_of_it() -> None:
    points = _points(lambda a, b, c: b < c, (9, 8, 5), 1 << 20)
    assert all(b >= c for _, b, c in points.all)
    assert any(c > 8 * a for a, _, c in points.all)
    assert any(b > 8 * c for _, b, c in points.all)
    assert any(a > 8 * b for a, b, _ in points.all)
