"""What a compilation shares with the process: the cache of parametrized weights."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.utils import parametrize

from tvmbridge import add_tvm_dispatch, dispatch_report


class Symmetric(nn.Module):
    """A parametrization that makes a matrix symmetric."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def test_first_calls_within_cached_parametrizations() -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    parametrize.register_parametrization(module[0], "weight", Symmetric())
    reference = copy.deepcopy(module)
    add_tvm_dispatch(module, on_fallback="silent")
    gradients = []
    for each in (reference, module):
        with parametrize.cached():
            (each(x).sum() + each(2 * x).square().sum()).backward()
        gradients.append([p.grad for p in each.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])
    assert (parametrize._cache_enabled, parametrize._cache) == (0, {})
    assert dispatch_report(module).tvm_calls == 2
