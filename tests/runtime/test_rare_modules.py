"""Rare modules in train mode agree with eager PyTorch, or are refused with a clear reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import assert_same_step, sample
from tests.thinned import thinned
from tvmbridge import BridgeError, CompileOptions, add_tvm_dispatch, dispatch_report

F = nn.functional


class TwoNames(nn.Module):
    """A module that calls one batch norm under two names."""

    def __init__(self, *, once: bool) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(24)
        self.second, self.inner, self.once = self.first, nn.Linear(24, 24), once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.inner(x))
        return x if self.once else self.first(self.inner(x))


@pytest.mark.parametrize("once", thinned([False, True], 2))
def test_a_norm_of_two_names_moves_its_statistics_as_in_eager(once: bool) -> None:
    plain = TwoNames(once=once).double().train()
    module = add_tvm_dispatch(copy.deepcopy(plain), sample().requires_grad_())
    for _ in range(2):
        assert_same_step(module, plain, sample())
        ours, theirs = module.state_dict(), plain.state_dict()
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-12)
    assert not dispatch_report(module).fallbacks
    module.second = copy.deepcopy(module.first)
    module(sample())
    assert len(dispatch_report(module).fallbacks) == 1


class Similar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(24))
        self.kept = [torch.arange(1.0, 25.0, dtype=torch.float64)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cosine_similarity(x * self.weight, self.kept[0], dim=-1)


@pytest.mark.parametrize("joint", thinned(["auto", "aot"], 2))
def test_a_constant_beside_what_pytorchs_own_code_writes(joint: Any) -> None:
    plain = Similar().double().train()
    options = CompileOptions(joint=joint)
    module = add_tvm_dispatch(copy.deepcopy(plain), sample().requires_grad_(), options=options)
    assert_same_step(module, plain, sample())
    assert not dispatch_report(module).fallbacks


class Gathers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.gather(x, 0, torch.zeros(1, 3, dtype=torch.int64), sparse_grad=True)


SPARSE: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "embedding": (
        lambda: nn.Embedding(5, 3, sparse=True),
        lambda: torch.tensor([[1, 2]]),
    ),
    "bag": (
        lambda: nn.EmbeddingBag(5, 3, sparse=True, mode="sum"),
        lambda: torch.tensor([[1, 2]]),
    ),
    "gather": (Gathers, lambda: torch.randn(2, 3, requires_grad=True)),
}


@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_gradients_are_refused_and_forward_is_served(kind: str) -> None:
    make, given = SPARSE[kind]
    x = given()
    with pytest.raises(BridgeError, match=r"has the layout torch\.sparse_coo"):
        add_tvm_dispatch(make().train(), x)
    module = make().eval()
    with torch.no_grad():
        expected = module(x)
        add_tvm_dispatch(module, x)
        torch.testing.assert_close(module(x), expected)
    assert not dispatch_report(module).fallbacks


class Writes(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) + y


def test_a_write_into_an_argument_that_shares_elements_is_refused() -> None:
    base = torch.randn(6, 3)
    with pytest.raises(BridgeError, match="an argument that shares elements with another"):
        add_tvm_dispatch(Writes().eval(), (base[:4], base[2:]))
    module = add_tvm_dispatch(Writes().eval(), (base[:4].clone(), base[2:]))
    given, others = base.clone(), base.clone()
    expected = Writes()(others[:4], others[2:])
    torch.testing.assert_close(module(given[:4], given[2:]), expected)
    assert torch.equal(given, others)
    assert len(dispatch_report(module).fallbacks) == 1
