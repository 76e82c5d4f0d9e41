"""Sums of few, long rows in code for any size: the elements after the last whole vector."""

from __future__ import annotations

import torch
from torch import nn
from torch.export import Dim

from tvmbridge import add_tvm_dispatch, dispatch_report


class Channels(nn.Module):
    """A sum for each channel, whose elements are not contiguous, over images of even sizes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum((0, 2, 3))


def test_sums_of_channels_end_at_the_last_element() -> None:
    torch.manual_seed(0)
    module = Channels().eval()
    batch, height, width = (Dim(name, min=2) for name in ("batch", "height", "width"))
    spec = ({0: batch, 2: 2 * height, 3: 2 * width},)
    add_tvm_dispatch(module, torch.randn(5, 2, 20, 22), dynamic_shapes=spec)
    shapes = [(5, 20, 22), (3, 10, 10), (7, 38, 26), (4, 16, 16), (9, 18, 46), (3, 14, 10)]
    for count, *image in shapes:
        x = torch.randn(count, 2, *image)
        expected = x.double().sum((0, 2, 3))
        torch.testing.assert_close(module(x).double(), expected, atol=1e-4, rtol=1e-5)
    report = dispatch_report(module)
    assert report.tvm_calls == len(shapes), report.fallbacks
