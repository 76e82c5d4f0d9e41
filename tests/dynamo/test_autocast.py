"""Autocast through torch.compile, around the model and inside it: results equal eager's."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import tvm
from torch import nn
from tvm import relax

import tvmbridge
from tests.thinned import thinned
from tvmbridge.pipeline import inference_passes, run_passes


class Attention(nn.Module):
    """Attention: three products of one value, a softmax in float32 and a norm."""

    def __init__(self, *, within: bool = False) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.within = within

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (project(x) for project in self.projections)
        return (query @ key.transpose(-1, -2)).softmax(-1) @ value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.within:
            return self.norm(self.attend(x) + x)
        with torch.autocast("cpu", torch.bfloat16):
            y = self.attend(x)
        return self.norm(y.float() + x)


def step(call: Any, owner: nn.Module, x: torch.Tensor, dtype: torch.dtype | None) -> list[Any]:
    owner.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        y = call(x)
    (y.float() * torch.arange(y.numel()).view(y.shape).cos()).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in owner.parameters())]


@pytest.mark.parametrize("within", thinned([False, True], 2))
def test_steps_are_those_of_eager(within: bool) -> None:
    module = Attention(within=within)
    reference = copy.deepcopy(module)
    compiled = tvmbridge.compile(module)
    states = [None] if within else [torch.bfloat16, None]
    for dtype in (*states, *states):
        x = torch.randn(4, 8, 16)
        found, expected = step(compiled, module, x, dtype), step(reference, reference, x, dtype)
        # All values went through half precision, so a last bit may differ. The gradient of the
        # key's bias is zero except for rounding.
        bound = torch.finfo(torch.bfloat16).eps * max(float(b.abs().max()) for b in expected)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype is b.dtype
            torch.testing.assert_close(a, b, rtol=0, atol=bound)
    report = tvmbridge.compile_report()
    assert report.whole, str(report)
    assert len(report.graphs) == len(states)


def casts(mod: tvm.IRModule) -> Counter[str]:
    """Return how often each parameter of the function is cast to another dtype."""
    found: Counter[str] = Counter()
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            call = binding.value
            if isinstance(call, relax.Call) and call.op == tvm.ir.Op.get("relax.astype"):
                found[call.args[0].name] += call.args[0] in list(mod["main"].params)
    return +found


def test_a_value_is_cast_once() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        mod = tvmbridge.to_relax(tvmbridge.capture(Attention().eval(), torch.randn(4, 8, 16)))
    assert casts(mod)["x"] == 3
    tidied = run_passes(mod, inference_passes(), [])
    assert casts(tidied)["x"] == 1
    # Each weight and bias is cast once, too.
    assert set(casts(tidied).values()) == {1}


def scaled_training(compiled: bool) -> tuple[list[float], list[float], list[torch.Tensor]]:
    """Return losses, scales and weights of steps with a GradScaler; the second step overflows."""
    torch.manual_seed(0)
    module = Attention()
    call = tvmbridge.compile(module) if compiled else module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    losses, scales = [], []
    for number in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = call(torch.randn(4, 8, 16)).square().mean()
        scaler.scale(loss * (float("inf") if number == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales, [p.detach() for p in module.parameters()]


def test_gradients_are_scaled_as_in_eager() -> None:
    losses, scales, weights = scaled_training(compiled=True)
    eager_losses, eager_scales, eager_weights = scaled_training(compiled=False)
    assert scales == eager_scales == [1024.0, 512.0, 512.0, 1024.0]
    bound = torch.finfo(torch.bfloat16).eps
    assert losses == pytest.approx(eager_losses, rel=bound)
    for found, expected in zip(weights, eager_weights, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0.1 * bound)
    assert tvmbridge.compile_report().whole
