"""Random operators draw eager PyTorch's numbers, and leave its generator in the same state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import assert_same_step, eager, sample
from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.kernels import table

F = nn.functional


class Applied(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.training)


# tests/test_dropout.py has the other forms of dropout.
RANDOM: dict[str, Callable[[torch.Tensor, bool], torch.Tensor]] = {
    "dropout twice": lambda x, t: F.dropout(x, 0.3, t) + F.dropout(x, 0.6, t),
    "dropout of a transpose": lambda x, t: F.dropout(x.transpose(0, 2), 0.3, t),
    "rand_like": lambda x, t: x * torch.rand_like(x),
    "randn of a shape": lambda x, t: x + torch.randn(x.shape, dtype=x.dtype),
    "randint": lambda x, t: x * torch.randint(0, 9, x.shape),
    "randperm": lambda x, t: x[torch.randperm(x.shape[0])] * 2,
    "uniform_": lambda x, t: x + torch.empty_like(x).uniform_(-2, 3),
    "normal_": lambda x, t: x + torch.empty_like(x).normal_(1, 3),
    "bernoulli_": lambda x, t: x * torch.empty_like(x).bernoulli_(0.3),
    "exponential_": lambda x, t: x + torch.empty_like(x).exponential_(2.0),
    "mixed": lambda x, t: F.dropout(x * torch.rand_like(x), 0.2, t) + torch.randn_like(x),
}


def _each_kind(x: torch.Tensor, t: bool) -> torch.Tensor:
    """Draw by each kind for a part of ``x``, one after the other, which one compilation tests."""
    pairs = zip(RANDOM.values(), x.unbind(), strict=True)
    return torch.cat([draw(part, t).flatten() for draw, part in pairs])


def test_draws_equal_eager() -> None:
    x = sample(len(RANDOM), 3, 4, 5)
    module = add_tvm_dispatch(Applied(_each_kind).train(), x.clone().requires_grad_())
    assert_same_step(module, eager(module), x)
    report = dispatch_report(module)
    assert report.tvm_calls == 1, report.fallbacks
    module.eval()
    assert_same_step(module, eager(module), x)


@pytest.mark.parametrize("counts", [False, True])
def test_a_draw_that_nothing_reads_moves_the_generator(counts: bool) -> None:
    """A program that writes a counter is decomposed as a whole, others operator by operator."""

    def unread(x: torch.Tensor, t: bool) -> torch.Tensor:
        torch.rand_like(x)
        if counts:
            module.get_buffer("calls").add_(1)
        return x + torch.rand_like(x)

    module = Applied(unread).eval()
    module.register_buffer("calls", torch.zeros(()))
    add_tvm_dispatch(module, sample(3, 4))
    found = []
    for each in (module, eager(module)):
        torch.manual_seed(1)
        found.append([each(sample(3, 4)), torch.get_rng_state()])
    torch.testing.assert_close(*found)
    assert dispatch_report(module).tvm_calls == 1


def test_masks_are_one_byte_an_element() -> None:
    module = add_tvm_dispatch(nn.Dropout(0.5).train(), sample().requires_grad_())
    ((_, entry),) = module.forward.code.kept.known[0].compiled()  # type: ignore[union-attr]
    (noise,) = entry.compiled.captured.noise
    assert noise.spec.dtype is torch.bool
    assert entry.compiled.residual_bytes == sample().numel()


class DrawsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.rand_like(gradient)


def test_draws_of_backward_are_not_made_in_forward() -> None:
    module = Applied(lambda x, t: DrawsInBackward.apply(x)).train()
    with pytest.raises(UnsupportedOperatorError, match="backward draws random numbers"):
        add_tvm_dispatch(module, sample(3, 4).requires_grad_())


class Products(nn.Module):
    """Matrix products, for which compilation measures several kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(24, 48), nn.Linear(24, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) * self.k(x)


def test_compilation_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tables: dict[object, table.Table] = {}
    monkeypatch.setattr(table, "_tables", tables)
    module, x = Products().train(), torch.randn(40, 24)
    before = torch.get_rng_state()
    add_tvm_dispatch(module, x)
    assert torch.equal(torch.get_rng_state(), before)
    assert tables  # compilation has measured kernels
