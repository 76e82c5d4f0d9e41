"""Results of compiled code on another stream: ``record_stream`` keeps their memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.gpu.helpers import GPU
from tvmbridge import add_tvm_dispatch

pytestmark = GPU
CYCLES = 2_000_000
SIZE = 1 << 20


class Shifted(nn.Module):
    """Returns a value that depends on the input alone, and has a weight to train."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * 0 + self.weight * x


def results(training: bool, graphs: bool) -> Callable[[float], torch.Tensor]:
    """Return a function that makes a result of compiled code whose elements are the argument."""
    module = Shifted().cuda().train(training)
    sample = torch.zeros(SIZE, device="cuda", requires_grad=training)
    add_tvm_dispatch(module, sample, options={"cuda_graphs": graphs})

    def output(value: float) -> torch.Tensor:
        with torch.no_grad():
            made: torch.Tensor = module(torch.full((SIZE,), value, device="cuda"))
        return made

    def gradient(value: float) -> torch.Tensor:
        x = torch.zeros(SIZE, device="cuda", requires_grad=True)
        (made,) = torch.autograd.grad(module(x), x, torch.full((SIZE,), value, device="cuda"))
        return made

    return gradient if training else output


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_memory_that_another_stream_reads_is_not_used_again(training: bool, graphs: bool) -> None:
    make, side = results(training, graphs), torch.cuda.Stream()
    for step in range(8):
        made = make(float(step))
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            read = made.clone()
        made.record_stream(side)
        del made
        others = [torch.full((SIZE,), -1.0, device="cuda") for _ in range(6)]
        torch.cuda.synchronize()
        assert torch.equal(read, torch.full_like(read, float(step)))
        del others
