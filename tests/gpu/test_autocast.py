"""Training under autocast on a GPU: as far from float64 as eager PyTorch under autocast."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.gpu.helpers import GPU, STEPS, batch, errors, gradients, replays, small
from tvmbridge import add_tvm_dispatch

pytestmark = GPU


def _step(module: nn.Module, x: torch.Tensor, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    module.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        output = module(x)
    cotangent = torch.ones_like(output)
    output.backward(cotangent)
    return {"output": output.detach().clone()} | gradients(module)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_training_step(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    eager = small().cuda()
    exact, tvm = copy.deepcopy(eager).double(), copy.deepcopy(eager)
    x = batch()
    with torch.autocast("cuda", dtype):
        add_tvm_dispatch(tvm, x)
    truth = _step(exact, x.double(), None)
    for _ in range(STEPS):
        found, expected = _step(tvm, x, dtype), _step(eager, x, dtype)
        assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in expected.items()}
        ours, theirs = errors(found, truth), errors(expected, truth)
        for name, error in ours.items():
            assert error <= 2 * theirs[name] + 1e-6, (name, error, theirs[name])
    assert replays(tvm) > 0
