"""Writes of learned values by masks and rows: results and gradients equal eager PyTorch's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report

MASK = torch.tensor([[True, False, True], [False, False, True]])


class Writes(nn.Module):
    def forward(self, x: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[mask] = v[0]
        z = x * 3
        z[mask] = v[:3]
        w = x * 4
        w.index_fill_(1, torch.tensor([0, 2, 0]), v[1])
        rows = x.index_put((mask[:, 2],), v[:3], accumulate=True)
        single = x[0, 0].index_fill(0, torch.tensor([0]), v[2])
        return torch.cat([y.index_put((mask,), v[3]), z, w, rows, single.expand(1, 3)])


def _results(module: nn.Module, *args: torch.Tensor) -> list[torch.Tensor]:
    x, v = (a.clone().requires_grad_() for a in args[:2])
    out = module(x, v, args[2])
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, v])]


def test_learned_values_are_written_and_get_their_gradient() -> None:
    plain = Writes().train()
    module = copy.deepcopy(plain)
    x, v = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3), (4,)))
    add_tvm_dispatch(module, (x, v, MASK))
    for mask in (MASK, MASK.flip(1).flip(0)):
        args = (torch.randn_like(x).detach(), torch.randn_like(v).detach(), mask)
        torch.testing.assert_close(_results(module, *args), _results(plain, *args))
    report = dispatch_report(module)
    assert report.tvm_calls == 2
    assert not report.fallbacks
    few = torch.zeros_like(MASK)
    few[:, :2] = True
    with pytest.raises(RuntimeError, match="shape mismatch"):
        module(x, v, few)


class WritesAtNumbers(nn.Module):
    def __init__(self, many: bool) -> None:
        super().__init__()
        self.many = many

    def forward(self, x: torch.Tensor, v: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        y, z, w = x * 2, x * 3, torch.zeros(4, 3, 3, dtype=torch.int64)
        y[:, i] = v[:3]
        z[i - 1, i] = v[3]
        w[-1:, i - 1, 1:] = 2.7
        if self.many:
            y[None, ..., i - 1, 0] = v[3:]
            z[i - 2, ..., None] = v[None, :, None]
            w[i - 2, i - 1] = i
        return torch.cat([y.flatten(), z.flatten(), w.flatten()])


@pytest.mark.slow
@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_writes_at_a_tensor_of_one_number(many: bool) -> None:
    plain = WritesAtNumbers(many).train()
    module = copy.deepcopy(plain)
    x, v = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4), (4,)))
    add_tvm_dispatch(module, (x, v, torch.tensor(1)))
    for number in (1, 0, -1, 2):
        i = torch.tensor(number)
        torch.testing.assert_close(_results(module, x, v, i), _results(plain, x, v, i))
    for outside in (4, -4):
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            module(x, v, torch.tensor(outside))
    report = dispatch_report(module)
    assert (report.tvm_calls, report.fallbacks) == (4, {})


class Pointer(nn.Module):
    """Writes a number that depends on a size, by an index and by a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("place", torch.zeros(3, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.place[0] = x.shape[0] * 2
        self.place[1:] = x.shape[0]
        return x * self.place[0]


@pytest.mark.slow
def test_integers_that_depend_on_a_size_are_written() -> None:
    module = Pointer().eval()
    plain = copy.deepcopy(module)
    add_tvm_dispatch(module, dynamic_shapes="auto")
    for rows in (5, 8, 11, 9, 7, 6, 10):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(module(x), plain(x))
        torch.testing.assert_close(module.place, plain.place)
    report = dispatch_report(module)
    assert report.tvm_calls == 7
    assert not report.fallbacks
