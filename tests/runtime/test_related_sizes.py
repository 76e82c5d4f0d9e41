"""Code for any size where forward relates two sizes, so that one symbol stands for both."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report


class Grows(nn.Module):
    """A module whose mask is one row longer than its cache."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5))

    def forward(self, cache: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.cat([cache, cache[:1]]) + mask) @ self.weight


@torch.no_grad()
def test_every_call_is_served() -> None:
    torch.manual_seed(0)
    eager = Grows().eval()
    module = copy.deepcopy(eager)
    calls = [(torch.randn(n, 6), torch.randn(n + 1, 6)) for n in (7, 9, 12, 31)]
    add_tvm_dispatch(module, calls[0], dynamic_shapes="auto")
    for call in calls:
        torch.testing.assert_close(module(*call), eager(*call))
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (len(calls), {})
