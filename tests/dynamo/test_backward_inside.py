"""Functions for torch.compile that call backward: TorchDynamo leaves that call to Python."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tvmbridge
from tvmbridge import add_tvm_dispatch
from tvmbridge.dynamo import tvmbridge as backend

PACKAGE = str(Path(tvmbridge.__file__).parent)


class Forces(nn.Module):
    """Returns an energy and its negative gradient, which can be differentiated again."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = places.detach().requires_grad_()
        energy = self.energy(places).sum()
        (gradient,) = torch.autograd.grad(energy, places, create_graph=True)
        return energy, -gradient


def _captured() -> set[str]:
    """Return the functions of tvmbridge that TorchDynamo has captured in this process."""
    frames: Any = sys.modules["torch._dynamo.convert_frame"]
    codes = [reference() for reference in frames.input_codes.seen]
    return {c.co_name for c in codes if c is not None and c.co_filename.startswith(PACKAGE)}


def test_a_gradient_that_is_differentiated_again() -> None:
    torch.manual_seed(0)
    module, before = Forces(), _captured()
    reference, places = copy.deepcopy(module).double(), torch.randn(5, 3)
    compiled = torch.compile(module, backend=backend, options={"smallest_graph": 1})
    for call, dtype in ((compiled, torch.float32), (reference, torch.float64)):
        energy, forces = call(places.to(dtype))
        (energy + forces.square().sum()).backward()
    for found, expected in zip(module.parameters(), reference.parameters(), strict=True):
        if expected.grad is None:
            assert found.grad is None
            continue
        assert found.grad is not None
        torch.testing.assert_close(found.grad.double(), expected.grad, rtol=1e-4, atol=1e-5)
    assert _captured() == before


def test_a_step_of_a_dispatched_module() -> None:
    torch.manual_seed(0)
    module, before = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), _captured()
    reference, x = copy.deepcopy(module).double(), torch.randn(6, 4)
    add_tvm_dispatch(module, x)
    loss = module(x).square().mean()

    def step(x: torch.Tensor) -> torch.Tensor:
        scaled = x * 2
        loss.backward()
        return scaled.sum()

    torch.compile(step, backend="eager")(x)
    reference(x.double()).square().mean().backward()
    for found, expected in zip(module.parameters(), reference.parameters(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(found.grad.double(), expected.grad, rtol=1e-4, atol=1e-5)
    assert _captured() == before
