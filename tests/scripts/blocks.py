"""Scripts whose modules drop layers, mix rows, wrap submodules, and keep the state of an LSTM."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.script import Door, script
from tests.scripts.state import steps


class _LayerDrop(nn.Module):
    """Leaves out layers by Python's random numbers, as wav2vec 2.0 does."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or random.random() > 0.4:
                x = x + layer(x)
        return x


@script(doors=("dispatch",))
def layer_drop(door: Door) -> Iterator[list[Any]]:
    random.seed(0)
    model = door(_LayerDrop())
    yield from steps(model, lambda m, i: [m(torch.randn(4, 8, requires_grad=True))])


class _Mixup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        share = float(torch.distributions.Beta(0.4, 0.4).sample())
        order = torch.randperm(x.size(0))
        out = self.net(share * x + (1 - share) * x[order])
        mixed: Tensor = F.cross_entropy(out, y) * share
        return mixed + F.cross_entropy(out, y[order]) * (1 - share)


@script()
def mixup_in_forward(door: Door) -> Iterator[list[Any]]:
    model = door(_Mixup())
    yield from steps(model, lambda m, i: [m(torch.randn(8, 8), torch.randint(0, 4, (8,)))])


class _Wrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.inner = torch.compile(inner, backend="aot_eager")
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.inner(x))


@script(doors=("dispatch",))
def compiled_submodule(door: Door) -> Iterator[list[Any]]:
    yield from steps(door(_Wrapping()), lambda m, i: [m(torch.randn(4, 8))])


class _Lstm(nn.Module):
    """Keeps the states of an LSTM in a tuple on self."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(6, 12, batch_first=True), nn.Linear(12, 2)
        self.hidden: tuple[Tensor, ...] | None = None

    def forward(self, x: Tensor) -> Tensor:
        y, hidden = self.rnn(x, self.hidden)
        self.hidden = tuple(t.detach() for t in hidden)
        result: Tensor = self.out(y)
        return result


# TorchDynamo leaves recurrent layers to PyTorch.
@script(doors=("dispatch",))
def lstm_state_on_self(door: Door) -> Iterator[list[Any]]:
    model = door(_Lstm())
    for out in steps(model, lambda m, i: [m(torch.randn(3, 5, 6))]):
        yield [*out, *(model.hidden or ())]
