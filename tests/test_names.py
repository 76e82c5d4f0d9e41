"""Inputs may have the names of inputs that compilation adds: cotangents, draws, packed weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tvmbridge import CompileOptions, add_tvm_dispatch, dispatch_report
from tvmbridge.passes.base import free_prefix


class Cotangent(nn.Module):
    """A module whose input and output have one shape, so that confusing them raises no error."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, dtype=torch.float64))

    def forward(self, ct_0: torch.Tensor, ct_1: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.w * ct_0.sin() * ct_1, ct_1.tanh() * ct_0


class Draw(Cotangent):
    def forward(self, noise_0: torch.Tensor, noise_1: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.dropout(self.w * noise_0.sin() * noise_1, 0.5, True),)


class Pack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(64, 64, bias=False, dtype=torch.float64)
        self.key = nn.Linear(64, 64, bias=False, dtype=torch.float64)

    def forward(self, packed_0: torch.Tensor, packed_1: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = packed_0.sin() * packed_1
        return (self.query(product) * self.key(product),)


@pytest.mark.parametrize(
    ("kind", "joint"),
    [(Cotangent, "relax"), (Cotangent, "aot"), (Draw, "aot"), (Pack, "relax")],
)
def test_gradients_are_those_of_eager(kind: type[nn.Module], joint: str) -> None:
    module = kind()
    ours = copy.deepcopy(module)
    args = [torch.randn(128, 64, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    options = CompileOptions(joint=joint, combine_matmuls="always")
    add_tvm_dispatch(ours, tuple(args), options=options)
    results = []
    for model in (ours, module):
        torch.manual_seed(1)
        outputs = model(*args)
        cotangents = [torch.randn_like(o) for o in outputs]
        wanted = [*args, *model.parameters()]
        results.append([*outputs, *torch.autograd.grad(outputs, wanted, cotangents)])
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)
    assert bool(dispatch_report(ours).packs) == (kind is Pack)


def test_a_prefix_that_no_name_begins_with() -> None:
    assert free_prefix("ct_", []) == "ct_"
    assert free_prefix("ct_", ["x", "act_0", "_ct_0"]) == "ct_"
    assert free_prefix("ct_", ["ct_x", "_ct_0"]) == "__ct_"
