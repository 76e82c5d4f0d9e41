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


# A batch norm returns empty statistics at all sizes.
@pytest.mark.parametrize(
    ("module", "same"),
    [(Copies(), True), (CopiesSeveral(), False), (nn.BatchNorm1d(7).eval(), True)],
)
def test_a_returned_argument_is_not_its_copy(module: nn.Module, same: bool) -> None:
    def traced(rows: int, *symbolic: int) -> SymbolicTrace:
        x = torch.randn(rows, 7, 8)
        return traced_with_symbols(module, (x,), {}, [(0, d) for d in symbolic], needs_grad=False)

    assert compute_alike(traced(5, 0, 1), traced(1, 1), [{0: (1, 9, 8)}]) is same


class Ranges(nn.Module):
    """Takes every nth number, as the bags of equally long rows begin."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(0, x.numel(), x.shape[1]).unsqueeze(1)


class Keeps(nn.Module):
    """Keeps its result in an attribute, always or for several columns."""

    def __init__(self, result: bool) -> None:
        super().__init__()
        self.result, self.last = result, torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if self.result or x.shape[1] > 1:
            self.last = y
        return y


@pytest.mark.parametrize(
    ("module", "same"), [(Ranges(), True), (Keeps(True), True), (Keeps(False), False)]
)
def test_steps_of_one_and_what_forward_keeps_are_alike(module: nn.Module, same: bool) -> None:
    def traced(columns: int, *symbolic: int) -> SymbolicTrace:
        dimensions = [(0, d) for d in symbolic]
        given = (torch.randn(7, columns),)
        return traced_with_symbols(module, given, {}, dimensions, needs_grad=False)

    assert compute_alike(traced(5, 0, 1), traced(1, 0), [{0: (9, 1)}]) is same
