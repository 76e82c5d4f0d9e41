"""Code for any size serves sizes of 2, at which kernels are equal that differ at other sizes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim

from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.runtime.family import Family

# Odd sizes, primes, and the least size of a symbol.
_SIZES = ((2, 2), (2, 3), (3, 2), (7, 13), (2, 31), (17, 2))


class Heads(nn.Module):
    """Two heads, whose transpositions are equal kernels for two positions alone.

    The gradient of the places is a sum over columns: one block of them for two positions. The sum
    for the scores' gradient has rows of columns, with several blocks in each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(40, 8))
        self.scores = nn.Parameter(torch.randn(2, 40, 40))
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        split = (x + self.places[:n]).view(b, n, 2, 4).transpose(1, 2)
        at = torch.arange(n)
        scores = split.sum(-1, keepdim=True) * self.scores[:, :n, :n]
        seen = torch.where(at <= at[:, None], scores, torch.zeros(())).softmax(-1)
        mixed = self.inner(seen @ split)
        y: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(b, n, 8))
        return y


def test_one_code_serves_sizes_from_two_on(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    genuine = Family._compile

    def counted(self: Family, *given: object) -> object:
        compiled.append(given)
        return genuine(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Family, "_compile", counted)
    torch.manual_seed(0)
    module = Heads()
    exact = copy.deepcopy(module).double()
    spec = ({0: Dim("batch", max=32), 1: Dim("length", max=40)},)
    add_tvm_dispatch(module, dynamic_shapes=spec, on_fallback="silent")
    for size in _SIZES:
        x = torch.randn(*size, 8)
        found = module(x), exact(x.double())
        for result in found:
            result.square().sum().backward()
        torch.testing.assert_close(found[0].double(), found[1], rtol=1e-4, atol=1e-5)
        for mine, other in zip(module.parameters(), exact.parameters(), strict=True):
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad.double(), other.grad, rtol=1e-4, atol=1e-4)
    report = dispatch_report(module)
    assert report.tvm_calls == len(_SIZES), report.fallbacks
    assert len(compiled) == 1


class Shifted(nn.Module):
    """Differences of neighbouring rows: of two rows one is left, which is no symbolic size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, 1:] - x[:, :-1]).softmax(1)


def test_a_size_that_forward_cannot_have_as_a_symbol_leaves_the_others_served() -> None:
    module = Shifted().eval()
    add_tvm_dispatch(module, dynamic_shapes="auto", on_fallback="silent")
    # The first call with another size, for which code is compiled, has the special one.
    sizes = [(4, 20), (4, 2), (4, 9), (4, 3), (5, 21), (3, 2), (7, 4), (2, 70), (9, 3)]
    for size in sizes:
        x = torch.randn(*size, 6)
        torch.testing.assert_close(module(x), Shifted()(x))
    assert dispatch_report(module).tvm_calls == len(sizes)


class Sums(nn.Module):
    """Sums in several orders, and a variance: at two columns, its count less one is one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x * self.scale
        return x.sum(), x.sum(0), x.sum(1), x.var(1)


# Training computes all that inference does.
@pytest.mark.parametrize("train", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sums_that_begin_at_the_least_sizes_are_served_at_all(train: bool) -> None:
    torch.manual_seed(0)
    module = Sums().train(train)
    exact = copy.deepcopy(module).double()
    shapes = {"x": {0: Dim.AUTO, 1: Dim.AUTO}}
    add_tvm_dispatch(module, dynamic_shapes=shapes, on_fallback="silent")
    sizes = ((2, 2), (3, 5), (7, 7), (2, 31), (17, 2), (8, 16))
    for size in sizes:
        x = torch.randn(size)
        with torch.set_grad_enabled(train):
            found = module(x), exact(x.double())
        for mine, other in zip(*found, strict=True):
            torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=1e-5)
        if train:
            for results in found:
                sum(each.sum() for each in results).backward()
    if train:
        torch.testing.assert_close(
            module.scale.grad.double(), exact.scale.grad, rtol=1e-4, atol=1e-4
        )
    report = dispatch_report(module)
    assert report.tvm_calls == len(sizes), report.fallbacks
