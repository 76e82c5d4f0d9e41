"""Transposes in tiles, for all extents."""

from __future__ import annotations

import pytest
import torch

from tvmbridge.schedules.alone import transposition

SIZES = [(2, 2), (3, 70), (17, 33), (33, 17), (64, 64), (31, 257), (788, 96), (100, 3072), (1, 9)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_a_copy_of_the_view(size: tuple[int, int]) -> None:
    matrix = torch.randn(size)
    found = transposition(*size)(matrix)
    assert found.is_contiguous()
    assert torch.equal(found, matrix.t())
