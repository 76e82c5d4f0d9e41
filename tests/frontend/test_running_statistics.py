"""Running statistics of batch norm equal those of PyTorch's kernels, in bfloat16 as well."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report


class Norms(nn.Module):
    """Batch norms with several momenta, each with its own input."""

    def __init__(self, momenta: tuple[float, ...]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(25, momentum=m) for m in momenta)

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return [norm(x) for norm, x in zip(self.norms, inputs, strict=True)]


def _inputs() -> tuple[torch.Tensor, ...]:
    # The last shape has 392 values a channel; n - 1 = 391 is no bfloat16 number.
    shapes = ((5, 25), (4, 25, 16), (8, 25, 49))
    return tuple(torch.randn(shape).mul(5).add(1).bfloat16() for shape in shapes)


def test_bfloat16_statistics_are_rounded_as_the_kernel_rounds_them() -> None:
    plain = Norms((0.5, 0.3, 0.1)).bfloat16().train()
    module = copy.deepcopy(plain)
    with torch.no_grad():
        add_tvm_dispatch(module, _inputs())
        for _ in range(5):
            batch = _inputs()
            module(*batch)
            plain(*batch)
    for (name, ours), theirs in zip(module.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    report = dispatch_report(module)
    assert report.tvm_calls == 5
    (served,) = [s for s in report.specializations if s.calls]
    assert "aten._native_batch_norm_legit_functional.default" in served.native_operators
