"""Arguments of other sizes, for which symbolic code is compiled."""

from __future__ import annotations

import pytest
import torch

from tvmbridge.symbolic.symbols import LinearSize, Symbols


def test_resized_integers_are_values_of_the_sample() -> None:
    symbols = Symbols((((0, 0), (1, 0)), ((0, 1),)))
    tokens, mask = torch.tensor([[7, 8], [9, 6]]), torch.tensor([True, False])
    (found, resized), _ = symbols.probe((tokens, mask), {}, (5, 3))
    assert found.tolist() == [[7, 8, 7], [9, 6, 9], [7, 8, 7], [9, 6, 9], [7, 8, 7]]
    assert resized.tolist() == [True, False, True, False, True]


def test_tensors_of_floats_are_not_filled() -> None:
    symbols = Symbols((((0, 0),),))
    (found,), _ = symbols.probe((torch.ones(2, 4),), {}, (1 << 20,))
    assert found.shape == (1 << 20, 4)


def test_equal_sizes_of_two_arguments_are_traced_as_equal_and_kept_apart() -> None:
    first, later = ([(0, (n, m)), (1, (n, m)), (2, (m, 4))] for n, m in ((3, 6), (5, 9)))
    symbols = Symbols.of(first, later)
    assert symbols is not None
    each = symbols.by_argument(first, later)
    assert each.dimensions == (((0, 0), (1, 0)), ((0, 1),), ((1, 1),), ((2, 0),))
    assert each.apart({0: (9, 9), 1: (9, 9), 2: (9, 4)}) == (9, 10, 10, 10)
    assert each.joined() == symbols
    assert each.without([None, None, 1, None]).equal == (0, 1, 1)


def test_sizes_that_are_equal_or_one_are_traced_as_equal() -> None:
    calls = [[(0, (3, n)), (1, (3, m)), (2, (3, k))] for n, m, k in ((6, 6, 5), (9, 1, 7))]
    symbols = Symbols.of(*calls)
    assert symbols is not None
    each = symbols.by_argument(*calls)
    assert each.equal == (0, 0, 2)
    assert each.apart({0: (3, 1), 1: (3, 9), 2: (3, 9)}) == (9, 9, 10)
    apart = [*calls, [(0, (3, 7)), (1, (3, 8)), (2, (3, 4))]]
    assert symbols.by_argument(*apart).equal == (0, 1, 2)


@pytest.mark.parametrize(("size", "joined"), [(6, True), (7, False), (1, True)])
def test_joined_dimensions_are_equal_or_one_in_a_call(size: int, joined: bool) -> None:
    symbols = Symbols((((0, 0), (1, 0)),), {(1, 0): LinearSize(1, 1)})
    assert symbols.are_joined([torch.ones(6), torch.ones(7)])
    symbols = Symbols((((0, 0), (1, 0)),))
    assert symbols.are_joined([torch.ones(6), torch.ones(size)]) == joined
