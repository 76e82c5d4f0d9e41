"""Indices of window maxima equal PyTorch's: the first of equal values, the last of NaNs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch, dispatch_report

WINDOWS = {
    "of two": ((2, 3, 8, 10), nn.MaxPool2d(2)),
    "that overlap, with edges": ((2, 2, 9, 8), nn.MaxPool2d(3, 2, 1)),
    "of other heights": ((1, 3, 17, 23), nn.MaxPool2d((3, 2), (2, 1), (1, 0))),
    "almost as large as the picture": ((1, 2, 7, 7), nn.MaxPool2d(5, 1, 2)),
    "that leave elements out": ((2, 2, 9, 8), nn.MaxPool2d(3, 3)),
    "with gaps": ((2, 2, 9, 8), nn.MaxPool2d(2, 1, 0, 2)),
    "without a batch": ((3, 8, 8), nn.MaxPool2d(3, 2, 1)),
}


def _pictures(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    if kind == "random":
        return torch.randn(shape)
    x = torch.randint(0, 3, shape).float()
    if kind == "special":
        x[torch.rand(shape) < 0.2] = float("nan")
        x[torch.rand(shape) < 0.1] = -float("inf")
    return x


@pytest.mark.parametrize("windows", thinned(WINDOWS, 2))
def test_maxima_and_their_gradients(windows: str) -> None:
    shape, eager = WINDOWS[windows]
    module = add_tvm_dispatch(nn.Sequential(eager), torch.randn(shape).requires_grad_())
    for kind in ("random", "ties", "special"):
        mine = _pictures(kind, shape).requires_grad_()
        theirs = mine.detach().clone().requires_grad_()
        found, expected = module(mine), eager(theirs)
        cotangent = torch.randn_like(expected)
        found.backward(cotangent)
        expected.backward(cotangent)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=0)
    assert dispatch_report(module).tvm_calls == 3
