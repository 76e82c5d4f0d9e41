"""Many equal chains on slices are fused before TVM lowers them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.thinned import thinned
from tvmbridge import add_tvm_dispatch, dispatch_report, explain


class Chains(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces = x.split(6, 1)
        pairs = zip(self.norms, pieces, strict=True)
        return torch.cat([torch.tanh(norm(piece)) for norm, piece in pairs], 1)


@pytest.mark.parametrize(("count", "fused"), thinned([(10, True), (7, False)], 2))
def test_many_chains_are_one(count: int, fused: bool) -> None:
    module, x = Chains(count).double().train(), torch.randn(5, 6 * count, dtype=torch.float64)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))
    found = explain(module, x)
    assert [r.name for r in found.fx_passes] == ["HorizontalFusion"] * fused
    assert explain(module, x, options={"fx_passes": ()}).fx_passes == ()
    ours = copy.deepcopy(module)
    add_tvm_dispatch(ours, x)
    results = []
    for each in (ours, module):
        output = each(x)
        output.square().sum().backward()
        results.append([output, *(p.grad for p in each.parameters())])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    assert dispatch_report(ours).fallbacks == {}
