"""Calls that a trace must rewrite agree with eager PyTorch, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.dispatch_helpers import eager
from tests.thinned import thinned
from tvmbridge import BridgeError, add_tvm_dispatch, dispatch_report


class Calls(nn.Module):
    """A module whose forward is ``function(self, x)``."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("mean", torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def _everything(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.mean.data.mul_(0.9).add_(x.data.mean(0), alpha=0.1)
    hidden = m.linear(x)
    hidden.data[0] = 2.0
    drawn = torch.empty(3, 4, dtype=x.dtype).random_(-2, 5)
    counted = torch.empty(3, 4, dtype=torch.int64).random_(3, to=1 << 40)
    return hidden * hidden.data * m.linear.weight.data.sum() + drawn + counted % 7 + m.mean


def test_data_is_read_and_written_and_integers_are_drawn_as_in_eager_pytorch() -> None:
    module = add_tvm_dispatch(
        Calls(_everything).train(), torch.randn(3, 4, dtype=torch.float64).requires_grad_()
    )
    plain, found = eager(module), []
    for called in (module, plain):
        torch.manual_seed(1)
        x = torch.arange(12, dtype=torch.float64).reshape(3, 4).div(7).requires_grad_()
        out = called(x)
        gradients = torch.autograd.grad(out.square().sum(), [x, *called.parameters()])
        found.append([out, gradients, called.mean, torch.get_rng_state()])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    assert dispatch_report(module).tvm_calls == 1


def _assigns(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.mean.data = m.mean * 0.9
    return x * m.mean  # type: ignore[no-any-return]


def _sets(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    y[x.argmax() % 3, torch.tensor([0, 1])] = 0
    return y  # type: ignore[no-any-return]


REFUSED: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    r"assigns to .data of a tensor.*test_rephrased": _assigns,
    r"writes to x\[i\] where i is a tensor of one number.*test_rephrased": _sets,
    "branches by the value of a tensor.*test_rephrased.*torch.where": lambda m, x: (
        x + 1 if m.linear(x).sum() > 0 else x
    ),
    "needs the value of a tensor as a Python number.*test_rephrased": lambda m, x: (
        x * float(x.max())
    ),
    r"random_\(-100, 100\) on torch.int8": lambda m, x: (
        x + torch.empty(4, dtype=torch.int8).random_(-100, 100)
    ),
    r"random_\(2, None\)": lambda m, x: x + torch.empty(4).random_(2, None),
    r"random_\(0, 16777217\) on torch.float16": lambda m, x: (
        x + torch.empty(4, dtype=torch.float16).random_(0, (1 << 24) + 1)
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_said_otherwise_is_refused_by_name(reason: str) -> None:
    with pytest.raises(BridgeError, match=reason):
        add_tvm_dispatch(
            Calls(REFUSED[reason]).eval(),
            torch.randn(3, 4, dtype=torch.float64),
            on_break="forward",
        )


@pytest.mark.parametrize("training", thinned([True, False], 2))
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_a_buffer_keeps_its_dtype_where_another_is_copied_into_it(
    dtype: torch.dtype, training: bool
) -> None:
    def follows(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.mean.copy_((x.sum(0) * 3).to(dtype))
        return m.linear(x) * m.mean

    module = Calls(follows).train(training)
    plain = eager(module)
    x = torch.randn(3, 4, dtype=torch.float64)
    add_tvm_dispatch(module, x)
    torch.testing.assert_close(module(x), plain(x))
    assert torch.equal(module.mean, plain.mean)
    assert module.mean.dtype is torch.float64
    assert dispatch_report(module).fallbacks == {}
