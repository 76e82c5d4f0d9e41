"""Scripts with averaged weights, checkpoints, tied weights, quantization and functional calls."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao import quantization
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.scripts.script import Door, script
from tests.scripts.training import stepped


def _classified(model: Any, optimizer: Any, shape: tuple[int, ...], steps: int) -> Iterator[Any]:
    """Train a classifier of three classes; yield the losses."""
    for _ in range(steps):
        loss = F.cross_entropy(model(torch.randn(shape)), torch.randint(0, 3, shape[:1]))
        yield [stepped(optimizer, loss)]


@script()
def swa_utils(door: Door) -> Iterator[list[Any]]:
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    model = door(nn.Sequential(*body, nn.Linear(8 * 36, 3)))
    swa = AveragedModel(model)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = SWALR(optimizer, 0.05)
    for epoch in range(4):
        for losses in _classified(model, optimizer, (4, 3, 8, 8), 5):
            ema.update_parameters(model)
            yield losses
        if epoch > 1:
            swa.update_parameters(model)
            schedule.step()
    data = [torch.randn(4, 3, 8, 8) for _ in range(5)]
    update_bn(data, swa)
    for averaged in (swa.eval(), ema.eval(), model.eval()):
        with torch.no_grad():
            for x in data:
                yield [averaged(x)]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class _Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.blocks = nn.Sequential(*(_Block() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if not self.training:
            return self.head(self.blocks(x))
        if not self.reentrant:
            return self.head(checkpoint_sequential(self.blocks, 2, x, use_reentrant=False))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


def _checkpointed(door: Door, reentrant: bool) -> Iterator[list[Any]]:
    model = door(_Checkpointed(reentrant))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    yield from _classified(model, optimizer, (8, 6), 12)
    model.eval()
    with torch.no_grad():
        for _ in range(4):
            yield [model(torch.randn(8, 6))]


@script()
def checkpointed_in_sequence(door: Door) -> Iterator[list[Any]]:
    yield from _checkpointed(door, False)


@script()
def checkpointed_reentrantly(door: Door) -> Iterator[list[Any]]:
    yield from _checkpointed(door, True)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(40, 16), nn.Linear(16, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 40, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.inner(self.words(ids)).tanh().cumsum(1)))


@script()
def tied_anew(door: Door) -> Iterator[list[Any]]:
    model = door(_Tied())
    for how in ("tied", "exchanged", "untied"):
        if how == "exchanged":
            model.words = nn.Embedding(40, 16)
            model.words.weight.data.copy_(model.head.weight)
            model.head.weight = model.words.weight
        if how == "untied":
            model.head.weight = nn.Parameter(model.words.weight.detach().clone())
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(8):
            ids = torch.randint(0, 40, (4, 7))
            loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            yield [stepped(optimizer, loss), model.words.weight]


@script()
def parametrizations_removed(door: Door) -> Iterator[list[Any]]:
    model = door(
        nn.Sequential(
            parametrizations.weight_norm(nn.Linear(6, 16)),
            nn.ReLU(),
            parametrizations.spectral_norm(nn.Linear(16, 16)),
            nn.ReLU(),
            nn.Linear(16, 3),
        )
    )
    yield from _classified(model, torch.optim.SGD(model.parameters(), 0.05), (8, 6), 8)
    model.eval()
    with torch.no_grad():
        for _ in range(4):
            yield [model(torch.randn(8, 6))]
    for layer in model.train():
        if parametrize.is_parametrized(layer):
            parametrize.remove_parametrizations(layer, "weight")
    yield from _classified(model, torch.optim.SGD(model.parameters(), 0.05), (8, 6), 8)


class _Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = quantization.QuantStub(), quantization.DeQuantStub()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.head = nn.Linear(8 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(self.enter(x))))
        return self.leave(self.head(x.flatten(1)))  # type: ignore[no-any-return]


# A value halfway between two quantized ones may be rounded to the other, which moves a loss.
@script(bound=1e-2)
def prepared_qat(door: Door) -> Iterator[list[Any]]:
    """Observers are disabled midway, then batch norms are frozen; a copy is converted to int8."""
    model: Any = _Quantized().train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    model = quantization.fuse_modules_qat(model, [["conv", "norm", "relu"]])
    model = door(quantization.prepare_qat(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    yield from _classified(model, optimizer, (4, 3, 8, 8), 10)
    model.apply(quantization.disable_observer)
    yield from _classified(model, optimizer, (4, 3, 8, 8), 6)
    model.apply(torch.nn.intrinsic.qat.freeze_bn_stats)
    yield from _classified(model, optimizer, (4, 3, 8, 8), 6)
    converted = quantization.convert(copy.deepcopy(model).eval())
    with torch.no_grad():
        yield [converted(torch.randn(4, 3, 8, 8))]


@script()
def functional_calls(door: Door) -> Iterator[list[Any]]:
    model = door(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for losses in _classified(model, optimizer, (8, 6), 12):
        x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        named = zip(model.named_parameters(), gradients, strict=True)
        fast = {name: p - 0.1 * g for (name, p), g in named}
        yield [*losses, functional_call(model, fast, (x,))]


@script(doors=("dispatch",))
def states_loaded(door: Door) -> Iterator[list[Any]]:
    """State dicts are loaded in place and by assignment; a pickled model is dispatched again."""
    # The gradient of a bias before a batch norm is rounding, which Adam would enlarge.
    first = nn.Linear(6, 16, bias=False)
    model = door(nn.Sequential(first, nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3)))
    yield from _classified(model, torch.optim.Adam(model.parameters(), 1e-2), (8, 6), 6)
    best = copy.deepcopy(model.state_dict())
    yield from _classified(model, torch.optim.Adam(model.parameters(), 1e-2), (8, 6), 6)
    model.load_state_dict(best)
    yield from _classified(model, torch.optim.Adam(model.parameters(), 1e-2), (8, 6), 4)
    model.load_state_dict({k: v.clone() for k, v in best.items()}, assign=True)
    yield from _classified(model, torch.optim.Adam(model.parameters(), 1e-2), (8, 6), 6)
    again = door(pickle.loads(pickle.dumps(model)))
    yield from _classified(again, torch.optim.Adam(again.parameters(), 1e-2), (8, 6), 6)
    copied = copy.deepcopy(again).eval()
    with torch.no_grad():
        for _ in range(4):
            yield [copied(torch.randn(8, 6))]


@script()
def called_by_threads(door: Door) -> Iterator[list[Any]]:
    model = door(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3)))
    wrapped = nn.DataParallel(model)
    yield from _classified(wrapped, torch.optim.SGD(model.parameters(), 0.05), (8, 6), 8)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            yield list(pool.map(model, [torch.randn(8, 6) for _ in range(4)]))
