"""Scripts whose inputs or results are no plain dense tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.data import STEPS, trained
from tests.scripts.script import Door, script


class _NestedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).relu()


# Nested tensors are no dense tensors.
@script(least=0.0)
def nested(door: Door) -> Iterator[list[Any]]:
    model = door(_NestedAttention().eval())
    with torch.no_grad():
        for i in range(6):
            rows = [torch.randn(n, 6) for n in (3, 5, 2 + i)]
            yield list(model(torch.nested.nested_tensor(rows, layout=torch.jagged)).unbind())


class _Fourier(nn.Module):
    """A layer of a Fourier neural operator: complex weights, and complex inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 6, dtype=torch.cfloat) * 0.1)
        self.skip = nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        f = torch.fft.rfft(x)
        out = torch.zeros_like(f)
        out[..., :6] = torch.einsum("bix,iox->box", f[..., :6], self.weight)
        return F.gelu(torch.fft.irfft(out, n=x.shape[-1]) + self.skip(x))


# Refused: gradients of complex weights.
@script(least=0.0)
def fourier_operator(door: Door) -> Iterator[list[Any]]:
    yield from trained(door(_Fourier()), lambda m, i: m(torch.randn(3, 4, 16)))


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4, dtype=torch.cfloat)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return y * torch.sigmoid(y.abs())


# Refused: gradients of complex weights.
@script(least=0.0)
def complex_inputs(door: Door) -> Iterator[list[Any]]:
    yield from trained(door(_Complex()), lambda m, i: m(torch.randn(5, 6, dtype=torch.cfloat)))


# Refused: sparse gradients.
@script(least=0.0)
def sparse_embedding(door: Door) -> Iterator[list[Any]]:
    model = door(nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(24, 2)))
    optimizers = (
        torch.optim.SparseAdam(list(model[0].parameters()), lr=1e-2),
        torch.optim.Adam(model[2].parameters(), lr=1e-2),
    )
    for _ in range(STEPS):
        loss = F.cross_entropy(model(torch.randint(0, 50, (6, 3))), torch.randint(0, 2, (6,)))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        yield [loss]


class _Outputs(NamedTuple):
    logits: Tensor
    features: list[Tensor]


@dataclass
class _Results:
    loss: Tensor | None
    outputs: _Outputs
    extra: dict[str, Any]


class _Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 3)

    def forward(self, batch: dict[str, Any]) -> _Results:
        x, features = batch["x"], []
        for layer in self.layers:
            x = layer(x).relu()
            features.append(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits, batch["y"]) if "y" in batch else None
        extra = {"norms": [f.norm() for f in features], "name": batch["name"], "none": None}
        return _Results(loss, _Outputs(logits, features), extra)


@script()
def structured(door: Door) -> Iterator[list[Any]]:
    model = door(_Structured())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _i in range(STEPS):
        out = model({"x": torch.randn(8, 6), "y": torch.randint(0, 3, (8,)), "name": "train"})
        assert out.loss is not None
        assert isinstance(out, _Results)
        optimizer.zero_grad()
        (out.loss + 0.01 * out.outputs.features[1].square().mean()).backward()
        optimizer.step()
        yield [out.loss, out.outputs.logits, *out.extra["norms"]]
