"""Functions of the user's that run between PyTorch's operators, during which the profiler rests."""

from __future__ import annotations

import sys

import torch
from torch import nn

from tvmbridge import add_tvm_dispatch

_SCALES = [2.0]


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x * _SCALES[0]


class _Late(nn.Module):
    """A module that calls a function of the user's after operators of PyTorch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _scaled(torch.relu(x) + 1)


def test_a_function_after_an_operator_is_watched() -> None:
    x, before = torch.randn(3), sys.getprofile()
    module = add_tvm_dispatch(_Late(), x)
    assert sys.getprofile() is before
    torch.testing.assert_close(module(x), (x.relu() + 1) * 2)
    _SCALES[0] = 3.0
    try:
        torch.testing.assert_close(module(x), (x.relu() + 1) * 3)
    finally:
        _SCALES[0] = 2.0
