"""The eager replay: it takes the same path through the module's code and has no side effects."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import tvmbridge
from tests.thinned import thinned
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.frontend.importer import constant


@functools.lru_cache(maxsize=2)
def _kept_positions(length: int) -> torch.Tensor:
    return torch.arange(length)


def _positions(length: int) -> torch.Tensor:
    """Return positions from a cache, but not while traced, as libraries do."""
    if torch.compiler.is_compiling():
        return torch.arange(length)
    return _kept_positions(length)


class Positions(nn.Module):
    """Add an embedding of positions; call ``.to()`` with the dtype that a layer already has."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear = self.linear.to(x.dtype)
        return self.linear(x + self.table(_positions(x.shape[1])).sin())


@pytest.mark.parametrize("joint", thinned(["auto", "aot"], 2))
def test_what_a_function_keeps_is_not_made_of_fake_tensors(joint: str) -> None:
    _kept_positions.cache_clear()
    torch.manual_seed(0)
    module, x = Positions().train(), torch.randn(2, 5, 4)
    linear = module.linear
    tvmbridge.add_tvm_dispatch(module, x, options={"joint": joint})
    assert _kept_positions.cache_info().currsize == 0
    ours = module(x)
    assert tvmbridge.dispatch_report(module).tvm_calls == 1
    assert module.linear is linear
    tvmbridge.remove_tvm_dispatch(module)
    torch.testing.assert_close(ours, module(x))


class ReadsAWrittenView(nn.Module):
    """Read a view under ``no_grad`` whose base was written after the view was created."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        row = y[0]
        y.mul_(3)
        z = x * 5
        with torch.no_grad():
            scale = row + 1
            z[-1] *= 0.5
        return y.sum(0) + scale * row + torch.sin(z).sum(0)


def test_a_view_of_what_was_written_may_be_read_without_autograd() -> None:
    """Check a view that autograd must regenerate, which fails if autograd is disabled entirely."""
    plain, module = ReadsAWrittenView().train(), ReadsAWrittenView().train()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    tvmbridge.add_tvm_dispatch(module, x)
    ours, theirs = module(x), plain(x)
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(out.square().sum(), x) for out in (ours, theirs)]
    torch.testing.assert_close(*gradients)
    assert tvmbridge.dispatch_report(module).tvm_calls == 1


def test_a_constant_without_values_is_refused() -> None:
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(3)
    with pytest.raises(UnsupportedOperatorError, match="its values are not known"):
        constant(fake)


@torch.library.custom_op("tvmbridge_tests::scaled", mutates_args=())
def _scaled(x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * sum(lengths.tolist()), x.clone()


def _scaled_backward(
    ctx: Any, gradient: torch.Tensor, other: torch.Tensor
) -> tuple[torch.Tensor, None]:
    return gradient * sum(ctx.lengths.tolist()) + other, None


def _keep_lengths(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.lengths = inputs[1]


_scaled.register_fake(lambda x, lengths: (torch.empty_like(x), torch.empty_like(x)))
_scaled.register_autograd(_scaled_backward, setup_context=_keep_lengths)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        first, second = _scaled(x * self.weight, lengths)
        return first + second


def test_a_derivative_of_two_results_that_reads_values_is_refused() -> None:
    sample = (torch.randn(3), torch.tensor([1, 2]))
    with pytest.raises(UnsupportedOperatorError, match=r"derivative.* reads values of tensors"):
        tvmbridge.add_tvm_dispatch(Scaled().train(), sample)
