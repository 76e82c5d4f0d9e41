"""Boolean intermediate values that a function stores between its loops."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from tvm import tirx

from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.schedules.bool_buffers import kept_as_bytes


class _Powers(nn.Module):
    """A module whose backward stores in separate loops whether bases and exponents are zero."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.pow(x[:, :1] * x[:, :1] + 0.5, y).sum(0)


class _Joined(nn.Module):
    """A module that reads a comparison within one part of a concatenation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.where(x.gt(0), x * 2, x.cos()), x], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_comparisons_in_parts_of_concatenations(dtype: torch.dtype) -> None:
    x = torch.randn(4, 16, dtype=dtype)
    module = add_tvm_dispatch(_Joined(), x)
    torch.testing.assert_close(module(x), _Joined()(x))
    assert dispatch_report(module).fallbacks == {}


@pytest.mark.parametrize("shape", [pytest.param((2, 4), marks=pytest.mark.slow), (2, 33)])
def test_gradients_equal_those_of_eager(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = torch.randn(shape[1], dtype=torch.float64, requires_grad=True)
    module = add_tvm_dispatch(_Powers(), (x, y))
    found = torch.autograd.grad(module(x, y).sum(), (x, y))
    assert dispatch_report(module).tvm_calls == 1
    torch.testing.assert_close(found, torch.autograd.grad(_Powers()(x, y).sum(), (x, y)))


def test_only_memory_that_is_allocated_becomes_bytes() -> None:
    given = tirx.decl_buffer([4], "bool", "given")
    own = tirx.decl_buffer([4], "bool", "own")
    zero = tirx.const(0, "int64")
    body = [
        tirx.AllocBuffer(own),
        tirx.BufferStore(own, tirx.Not(tirx.BufferLoad(given, [zero])), [zero]),
        tirx.BufferStore(given, tirx.BufferLoad(own, [zero]), [zero]),
    ]
    allocated, kept, written = kept_as_bytes(tirx.SeqStmt(body)).seq
    assert str(allocated.buffer.dtype) == str(kept.value.ty.dtype) == "int8"
    assert kept.buffer.same_as(allocated.buffer)
    assert written.buffer.same_as(given)
    assert isinstance(written.value, tirx.NE)
