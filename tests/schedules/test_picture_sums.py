"""Values stored by a loop over rows and read at an index that TVM cannot simplify to the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report


@pytest.mark.parametrize("extents", [pytest.param((28, 28), marks=pytest.mark.slow), (12, 20)])
def test_the_gradient_of_batch_norm(extents: tuple[int, int]) -> None:
    eager = nn.BatchNorm2d(6).double().train()
    inputs = [torch.randn(3, 6, *extents, dtype=torch.float64, requires_grad=True)]
    inputs.append(inputs[0].detach().clone().requires_grad_())
    ours = add_tvm_dispatch(copy.deepcopy(eager), inputs[0], options={"joint": "relax"})
    for module, x in zip((ours, eager), inputs, strict=True):
        module(x).sin().sum().backward()
    assert dispatch_report(ours).tvm_calls == 1
    for mine, theirs in zip(
        [inputs[0], *ours.parameters()], [inputs[1], *eager.parameters()], strict=True
    ):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-11)
