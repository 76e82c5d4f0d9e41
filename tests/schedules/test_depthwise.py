"""Depthwise convolutions in loops are as accurate as PyTorch's, without stray writes."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from tvmbridge.schedules.alone import compiled, this_machine
from tvmbridge.schedules.depthwise import Depthwise, depthwise, fits

GUARD = 1234.5
FORMS = [
    Depthwise(2, 3, 1, (9, 28), (3, 3), (1, 1), (1, 1), (1, 1)),
    Depthwise(1, 2, 2, (14, 15), (5, 5), (2, 2), (2, 2), (1, 1)),
    Depthwise(1, 3, 1, (3, 7), (3, 5), (1, 1), (1, 4), (1, 2)),
    Depthwise(1, 2, 1, (40, 41), (4, 3), (3, 3), (0, 1), (2, 2)),
    Depthwise(1, 1, 3, (2, 70), (2, 7), (1, 2), (0, 3), (1, 1)),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_equals_the_convolution_in_float64(form: Depthwise) -> None:
    assert fits(form)
    torch.manual_seed(0)
    data, weight = torch.randn(form.shapes[0]), torch.randn(form.shapes[1])
    room = torch.full((math.prod(form.shapes[2]) + 128,), GUARD)
    result = room[64:-64].view(form.shapes[2])
    compiled(depthwise(form, this_machine()))(data, weight, result)
    settings = (form.stride, form.padding, form.dilation, form.channels)
    exact = functional.conv2d(data.double(), weight.double(), None, *settings)
    rounding = exact.abs().max() * torch.finfo(torch.float32).eps
    assert (result.double() - exact).abs().max() < 4 * rounding
    assert (room[:64] == GUARD).all()
    assert (room[-64:] == GUARD).all()
