"""Whether a trace with symbols computes the same as a trace in which a size is 1."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tvmbridge.graph_capture.any_size import SymbolicTrace, traced_with_symbols
from tvmbridge.graph_capture.ones import compute_alike


class Copies(nn.Module):
    """Returns a copy of the argument, beside a result."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.clone(), x * 2


class CopiesSeveral(nn.Module):
    """Returns a copy of several rows, and one row itself."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x.clone() if x.shape[0] > 1 else x), x * 2


@pytest.mark.parametrize(("module", "same"), [(Copies(), True), (CopiesSeveral(), False)])
def test_a_returned_argument_is_not_its_copy(module: nn.Module, same: bool) -> None:
    def traced(rows: int, *symbolic: int) -> SymbolicTrace:
        x = torch.randn(rows, 7, 8)
        return traced_with_symbols(module, (x,), {}, [(0, d) for d in symbolic], needs_grad=False)

    assert compute_alike(traced(5, 0, 1), traced(1, 1), [{0: (1, 9, 8)}]) is same
