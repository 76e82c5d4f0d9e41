"""Sorts along a dimension of any size: the number of merges follows from the size at a call."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch, dispatch_report


class Sorted(nn.Module):
    """Values and indices of a sort along dimension 1."""

    def __init__(self, descending: bool) -> None:
        super().__init__()
        self.descending = descending

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.sort(x, dim=1, descending=self.descending, stable=True)
        return values, indices


@pytest.mark.parametrize("descending", thinned([True, False], 2))
def test_sorts_along_a_symbolic_dimension(descending: bool) -> None:
    torch.manual_seed(0)
    module = Sorted(descending).eval()
    add_tvm_dispatch(module, torch.randn(3, 20, 2), dynamic_shapes=({1: Dim("n", min=2)},))
    for count in (2, 3, 4, 5, 8, 9, 31, 32, 33, 64, 65, 100, 129, 20):
        x = torch.randint(-9, 9, (3, count, 2)).float()  # many are equal: a sort must be stable
        x[0, 0, 0] = torch.nan
        torch.testing.assert_close(module(x), Sorted(descending)(x), equal_nan=True, rtol=0, atol=0)
    report = dispatch_report(module)
    assert report.tvm_calls == 14, report.fallbacks
    (entry, *_) = report.specializations
    assert not entry.aten_operators
