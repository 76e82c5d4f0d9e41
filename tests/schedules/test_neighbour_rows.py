"""Rows that read a neighbouring row, which must not use values stored for the own row alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch, dispatch_report

Function = Callable[[torch.Tensor], torch.Tensor]


def _sum_moved_by_cat(x: torch.Tensor) -> torch.Tensor:
    total = x.sum(1)
    return torch.cat([total[:1], total[:-1]])[:, None] - x


def _sum_moved_by_scatter(x: torch.Tensor) -> torch.Tensor:
    total = x.sum(1)
    return x - torch.slice_scatter(total, total[:-1], 0, 1, 7)[:, None]


def _softmax_moved_by_cat(x: torch.Tensor) -> torch.Tensor:
    weights = torch.softmax(x, 1)
    return torch.cat([weights[:1], weights[:-1]]) - weights


def _softmax_moved_by_padding(x: torch.Tensor) -> torch.Tensor:
    weights = torch.softmax(x, 1)
    return functional.pad(weights, (0, 0, 1, -1)) - weights


def _halves_of_a_row(x: torch.Tensor) -> torch.Tensor:
    weights = torch.softmax(x, 1)
    left, right = weights.chunk(2, 1)
    return torch.cat([-right, left], 1) * weights


FUNCTIONS = (
    _sum_moved_by_cat,
    _sum_moved_by_scatter,
    _softmax_moved_by_cat,
    _softmax_moved_by_padding,
    _halves_of_a_row,
)


class Moved(nn.Module):
    """A module that applies each function to an input of its own."""

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return [function(x) for function, x in zip(FUNCTIONS, inputs, strict=True)]


@pytest.mark.parametrize("columns", thinned([2, 32], 2))
def test_equals_eager(columns: int) -> None:
    # Rows of one element, except where rows have halves.
    widths = [columns if columns > 2 or f is _halves_of_a_row else 1 for f in FUNCTIONS]
    inputs = tuple(torch.randn(7, width, dtype=torch.float64) for width in widths)
    module = add_tvm_dispatch(Moved().eval(), inputs)
    torch.testing.assert_close(module(*inputs), Moved()(*inputs), rtol=1e-13, atol=1e-13)
    assert dispatch_report(module).tvm_calls == 1
