"""Arguments of other sizes, for which symbolic code is compiled."""

from __future__ import annotations

import torch

from tvmbridge.symbolic.symbols import Symbols


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
