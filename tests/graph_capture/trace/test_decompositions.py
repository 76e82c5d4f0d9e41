"""Decompositions keep results, strides and views of PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.frontend.helpers import assert_like_eager
from tests.joint_cases import Case
from tests.joint_steps import assert_same, build, dispatched, step
from tests.thinned import thinned
from tvmbridge.graph_capture.trace.decompositions import _copy, _view


class FusedProjection(nn.Module):
    """Attention whose queries, keys and values are views of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.project(x).view(*x.shape[:-1], 2, 3, 2)
        query, key, value = (parts[..., i, :].transpose(1, 2) for i in range(3))
        return torch.softmax(query @ key.mT, -1) @ value


class WritesThroughAView(nn.Module):
    """Scales a permuted view of a projection in place."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.project(x)
        query = whole.view(2, 5, 3, 4).permute(0, 2, 1, 3)
        query /= torch.sqrt(torch.tensor(4.0, dtype=x.dtype))
        return query @ query.mT


@pytest.mark.parametrize("make", thinned([FusedProjection, WritesThroughAView], 2))
def test_views_of_what_was_taken_apart(make: Callable[[], nn.Module]) -> None:
    case = Case(make, lambda: (torch.randn(2, 5, 6),), "aot")
    module, args = build(case)
    expected = step(module, args)
    assert_same(step(dispatched(module, args, "aot")[0], args), expected)


def test_a_copy_has_the_strides_of_what_it_is_copied_into() -> None:
    x = torch.randn(2, 5, 3, 4).permute(0, 2, 1, 3)
    source = torch.randn(2, 3, 5, 4)
    copy = _copy(x, source)
    assert copy.stride() == x.stride()
    assert torch.equal(copy, source)
    assert _copy(source, x).shape == source.shape


def test_a_view_is_a_view_where_strides_allow_one() -> None:
    x = torch.arange(12.0).view(3, 4)
    assert _view(x, [4, 3]) is NotImplemented
    assert torch.equal(_view(x.T, [12]), x.T.reshape(12))


def test_rows_of_a_strided_or_expanded_tensor_are_filled() -> None:
    def fills(x: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
        expanded = x[:1].expand(3, 4)
        filled = [t.index_fill(1, index, 2.0) for t in (x, x.t(), expanded)]
        return [*filled, expanded.index_fill(0, index, value), x[0, :1].index_fill(0, index[0], 5)]

    # An index may be negative.
    index, value = torch.tensor([0, -1]), torch.tensor(3.0)
    assert_like_eager(fills, torch.randn(3, 4), index, value)


def test_softmax_backward_takes_the_sum_away_before_the_product() -> None:
    def backward(grad: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._softmax_backward_data(grad, result, 1, grad.dtype)

    result = torch.randn(3, 4).softmax(1)
    result[1, 2] = torch.inf
    assert_like_eager(backward, torch.randn(3, 4), result)
