"""Functions of empty tensors: results and gradients equal eager PyTorch's."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional

from tvmbridge import add_tvm_dispatch, dispatch_report


class OfNothing(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        losses = [
            functional.mse_loss(x, y),
            functional.smooth_l1_loss(x, y, beta=0.5),
            functional.huber_loss(x, y, reduction="mean"),
            functional.mse_loss(x, y, reduction="sum"),
            functional.mse_loss(x[:, :0], x[:, :0]),
        ]
        parts = [p * 2 for p in (*x.split(2), *torch.unsafe_split(y, 2), *x.split(2, dim=1))]
        return [*losses, *parts]


def test_losses_and_parts_of_nothing_train() -> None:
    plain = OfNothing().train()
    module = copy.deepcopy(plain)
    x, y = (torch.randn(0, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    add_tvm_dispatch(module, (x, y))
    found = []
    for called in (module, plain):
        out = called(x, y)
        found.append([*out, *torch.autograd.grad([o.sum() for o in out], [x, y])])
    torch.testing.assert_close(*found, equal_nan=True)
    report = dispatch_report(module)
    assert report.tvm_calls == 1
    assert not report.fallbacks
