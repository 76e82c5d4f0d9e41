"""Autocast on a GPU: casts at the same operators as PyTorch's, and training as exact as eager."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from tests.gpu.helpers import GPU, STEPS, batch, errors, gradients, replays, small
from tests.graph_capture.trace.test_autocast_lists import LOSSES, Calls, samples
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.graph_capture.trace.autocast import casts_recorded

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


class _Loss(nn.Module):
    """A layer that returns a loss of its output."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.name = name

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return LOSSES[self.name](self.layer(x), target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    eager = _Loss(name).cuda()
    tvm = copy.deepcopy(eager)
    x, target = torch.randn(4, 8, device="cuda"), torch.tensor([1, 0, 7, -100], device="cuda")
    if name not in ("cross_entropy", "label_smoothing", "nll_loss"):
        target = target.clamp(min=0)
    with torch.autocast("cuda", dtype):
        add_tvm_dispatch(tvm, (x, target))
    for _ in range(STEPS):
        found = []
        for module in (tvm, eager):
            module.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype):
                loss = module(x, target)
            loss.backward()
            found.append({"loss": loss.detach().clone()} | gradients(module))
        ours, theirs = found
        assert {n: t.dtype for n, t in ours.items()} == {n: t.dtype for n, t in theirs.items()}
        # Eager PyTorch also rounds each intermediate value to half precision.
        assert all(error < 2e-2 for error in errors(ours, theirs).values()), errors(ours, theirs)
    assert dispatch_report(tvm).fallbacks == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_listed_operator_has_eagers_values(dtype: torch.dtype) -> None:
    calls, given, expected = [], [], []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for call in samples("cuda", dtype):
            tensors = [t.cuda() for t in call[2]]
            try:
                expected.append(Calls([call], "cuda").one(0, tensors))
            except Exception:
                continue  # Eager PyTorch refuses the dtype or mixed devices.
            calls.append(call)
            given.append(tensors)
        with casts_recorded():
            program = torch.export.export(Calls(calls, "cuda"), tuple(given), strict=False)
        found = program.module()(*given)
    assert len(calls) > 90
    for (name, *_), ours, theirs in zip(calls, found, expected, strict=True):
        torch.testing.assert_close(
            ours, theirs, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )
