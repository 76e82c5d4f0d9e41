"""Scripts whose modules keep state: counters, annealed numbers, queues, distributions."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.script import Door, script

STEPS = 14


def steps(model: Any, call: Any, lr: float = 0.05) -> Iterator[list[Any]]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    for i in range(STEPS):
        optimizer.zero_grad()
        out = call(model, i)
        loss = sum(t.float().square().mean() for t in out if t.requires_grad)
        loss.backward()
        optimizer.step()
        yield [loss, *out]


class _Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return self.body(x)


@script()
def counter(door: Door) -> Iterator[list[Any]]:
    model = door(_Counter())
    for out in steps(model, lambda m, i: [m(torch.randn(6, 8))]):
        yield [*out, model.step]


class _CounterRead(_Counter):
    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return self.body(x) / (1.0 + 0.1 * self.step)


@script()
def counter_read(door: Door) -> Iterator[list[Any]]:
    model = door(_CounterRead())
    for out in steps(model, lambda m, i: [m(torch.randn(6, 8))]):
        yield [*out, model.step]


class _CounterBias(_Counter):
    """As Adam corrects its bias: a decay by the power of a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        self.step += 1
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y - self.mean / (1 - 0.9**self.step)


@script()
def counter_power(door: Door) -> Iterator[list[Any]]:
    model = door(_CounterBias())
    for out in steps(model, lambda m, i: [m(torch.randn(6, 8))]):
        yield [*out, model.step]


class _Warm(_Counter):
    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        scale = min(1.0, self.step / 5)
        return self.body(x) * scale


@script()
def counter_branches(door: Door) -> Iterator[list[Any]]:
    model = door(_Warm())
    for out in steps(model, lambda m, i: [m(torch.randn(6, 8))]):
        yield [*out, model.step]


class _Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 5)
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.body(x) / self.temperature, -1)


@script()
def temperature(door: Door) -> Iterator[list[Any]]:
    model = door(_Annealed())
    for out in steps(model, lambda m, i: [m(torch.randn(6, 8))]):
        yield out
        model.temperature *= 0.9


class _Gumbel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(8, 5), nn.Linear(5, 3)
        self.tau, self.beta = 1.0, 0.0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.body(x)
        z = F.gumbel_softmax(logits, tau=self.tau, hard=False)
        kl = (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        return self.out(z), self.beta * kl


@script()
def gumbel_annealed(door: Door) -> Iterator[list[Any]]:
    model = door(_Gumbel())
    for i, out in enumerate(steps(model, lambda m, i: list(m(torch.randn(6, 8))))):
        yield out
        model.tau, model.beta = max(0.5, 1.0 - 0.03 * i), min(1.0, i / 10)


class _Submodule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Annealed(), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@script()
def temperature_in_submodule(door: Door) -> Iterator[list[Any]]:
    model = door(_Submodule())
    for i, out in enumerate(steps(model, lambda m, i: [m(torch.randn(6, 8))])):
        yield out
        model.first.temperature = 1.0 / (1 + i)


class _Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@script()
def dropout_schedule(door: Door) -> Iterator[list[Any]]:
    model = door(_Dropout())
    for i, out in enumerate(steps(model, lambda m, i: [m(torch.randn(6, 8))])):
        yield out
        model.body[1].p = 0.1 + 0.1 * (i // 5)


# The rate of dropout is a constant.
@script(least=0.0)
def dropout_annealed(door: Door) -> Iterator[list[Any]]:
    model = door(_Dropout())
    for i, out in enumerate(steps(model, lambda m, i: [m(torch.randn(6, 8))])):
        yield out
        model.body[1].p = 0.1 + 0.02 * i


@dataclass
class _Settings:
    margin: float = 0.1
    name: str = "a"


class _Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.settings = _Settings()
        self.weights = {"a": 1.0, "b": 0.5}
        self.body = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return F.relu(y - self.settings.margin) * self.weights["a"] + y * self.weights["b"]


@script()
def numbers_in_settings(door: Door) -> Iterator[list[Any]]:
    model = door(_Configured())
    for i, out in enumerate(steps(model, lambda m, i: [m(torch.randn(6, 8))])):
        yield out
        model.settings.margin = 0.1 + 0.05 * i
        model.weights["b"] = 0.5 / (1 + i)


class _Queue(nn.Module):
    """A momentum contrast model: a queue in a buffer, written at a pointer in another."""

    def __init__(self, python_pointer: bool) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(8, 32), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.place, self.python_pointer = 0, python_pointer

    @torch.no_grad()
    def _enqueue(self, keys: Tensor) -> None:
        place = self.place if self.python_pointer else int(self.pointer)
        self.queue[:, place : place + keys.shape[0]] = keys.T
        place = (place + keys.shape[0]) % 32
        if self.python_pointer:
            self.place = place
        else:
            self.pointer[0] = place

    @torch.no_grad()
    def _momentum(self) -> None:
        for p, q in zip(self.key.parameters(), self.query.parameters(), strict=True):
            p.data = p.data * 0.9 + q.data * 0.1

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        q = F.normalize(self.query(a), dim=1)
        with torch.no_grad():
            self._momentum()
            k = F.normalize(self.key(b), dim=1)
        positive = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([positive, negative], dim=1) / 0.07
        labels = torch.zeros(logits.shape[0], dtype=torch.long)
        self._enqueue(k)
        return F.cross_entropy(logits, labels), logits


# Compiled in parts: forward assigns to .data. One graph of torch.compile cannot do that.
@script(compiled=0.2)
def moco(door: Door) -> Iterator[list[Any]]:
    model = door(_Queue(False))
    for out in steps(model, lambda m, i: list(m(torch.randn(4, 12), torch.randn(4, 12)))):
        yield [*out, model.queue]


@script(compiled=0.0)
def moco_python_pointer(door: Door) -> Iterator[list[Any]]:
    model = door(_Queue(True))
    for out in steps(model, lambda m, i: list(m(torch.randn(4, 12), torch.randn(4, 12)))):
        yield [*out, model.queue, model.place]


class _QueueRolled(_Queue):
    def _enqueue(self, keys: Tensor) -> None:
        self.queue.copy_(torch.cat([keys.T, self.queue[:, : -keys.shape[0]]], 1))

    def _momentum(self) -> None:
        for p, q in zip(self.key.parameters(), self.query.parameters(), strict=True):
            p.data.mul_(0.9).add_(q.data, alpha=0.1)


@script()
def moco_rolled(door: Door) -> Iterator[list[Any]]:
    model = door(_QueueRolled(False))
    for out in steps(model, lambda m, i: list(m(torch.randn(4, 12), torch.randn(4, 12)))):
        yield [*out, model.queue]


class _Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(32))
        self.mask = nn.Sequential(nn.Linear(17, 24), nn.ReLU(), nn.Linear(24, 17), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.stft(x, 32, 8, window=self.window, return_complex=True)
        self.mag, self.phase = spectrum.abs(), spectrum.angle()
        mask = self.mask(self.mag.transpose(1, 2)).transpose(1, 2)
        return torch.istft(spectrum * mask, 32, 8, window=self.window, length=x.shape[-1])


@script()
def audio_mask(door: Door) -> Iterator[list[Any]]:
    model = door(_Spectrum())
    for out in steps(model, lambda m, i: [m(torch.randn(3, 256))]):
        yield [*out, model.mag]


class _Memory(nn.Module):
    """A recurrent model that keeps its hidden state on self, detached, as truncated BPTT does."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(6, 8), nn.Linear(8, 2)
        self.hidden: Tensor | None = None

    def reset(self) -> None:
        self.hidden = None

    def forward(self, x: Tensor) -> Tensor:
        if self.hidden is None:
            self.hidden = x.new_zeros(x.shape[0], 8)
        self.hidden = self.cell(x, self.hidden.detach())
        return self.out(self.hidden)


# The call after each reset fills the state in eager PyTorch.
@script(least=0.8)
def hidden_on_self(door: Door) -> Iterator[list[Any]]:
    model = door(_Memory())
    for i, out in enumerate(steps(model, lambda m, i: [m(torch.randn(4, 6))])):
        yield [*out, model.hidden]
        if i % 6 == 5:
            model.reset()


class _KvCache(nn.Module):
    """Attention with a list of the keys and values so far."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.past: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.past is not None:
            k, v = torch.cat([self.past[0], k], 1), torch.cat([self.past[1], v], 1)
        self.past = (k.detach(), v.detach())
        return F.scaled_dot_product_attention(q, k, v)


@script()
def kv_on_self(door: Door) -> Iterator[list[Any]]:
    model = door(_KvCache().eval(), dynamic_shapes="auto")
    with torch.no_grad():
        for _ in range(20):
            yield [model(torch.randn(2, 1, 16))]


class _Losses(nn.Module):
    """A module that appends its losses to a list and keeps the last outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 4)
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        self.cache["features"] = h
        self.cache["norm"] = h.norm()
        return h.relu()


@script()
def outputs_in_dict(door: Door) -> Iterator[list[Any]]:
    model = door(_Losses())

    def call(m: Any, i: int) -> list[Tensor]:
        out = m(torch.randn(6, 8))
        return [out, m.cache["norm"]]

    for out in steps(model, call):
        yield [*out, model.cache["features"]]
