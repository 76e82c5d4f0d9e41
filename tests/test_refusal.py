"""What cannot be captured is refused, and the generators stay as they were."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch import nn

import tvmbridge
from tvmbridge.errors import CaptureError


class Masks(nn.Module):
    """Hides elements that another library's generator chooses, in training."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.source = source

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            if self.source == "random":
                keep = [random.random() > 0.5 for _ in range(4)]
            else:
                keep = (numpy.random.rand(4) > 0.5).tolist()
            x = x * torch.tensor(keep)
        return self.linear(x)


@pytest.mark.parametrize("source", ["random", "numpy.random"])
def test_draws_of_other_generators_are_refused(source: str) -> None:
    module, x = Masks(source).train(), torch.randn(2, 4)
    states = random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore[call-overload]
    with pytest.raises(CaptureError, match=f"draws from {source}, which"):
        tvmbridge.add_tvm_dispatch(module, x)
    assert states == (random.getstate(), numpy.random.get_state()[1].tolist())  # type: ignore[call-overload]
    tvmbridge.add_tvm_dispatch(module.eval(), x)
