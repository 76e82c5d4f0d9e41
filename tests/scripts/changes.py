"""Scripts that change their modules while they train: weights, layers, norms, hooks, dtypes."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, nn

from tests.scripts.script import Door, script
from tests.scripts.training import STEPS, classify, mlp, stepped


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)


@script()
def schedules_and_average(door: Door) -> Iterator[list[Any]]:
    """A warm-up, clipping, and an average of the weights that validation uses."""
    model = door(mlp(6, 16, 3))
    average = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [4])
    for i in range(STEPS):
        x = torch.randn(8, 6)
        loss = F.cross_entropy(model(x), torch.randint(0, 3, (8,)))
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        for name, value in model.state_dict().items():
            average[name].mul_(0.9).add_(value, alpha=0.1)
        if i % 4 == 3:
            kept = copy.deepcopy(model.state_dict())
            model.load_state_dict(average)
            with torch.no_grad():
                yield [model.eval()(x)]
            model.train().load_state_dict(kept)
        yield [loss, norm]


@script()
def layers_replaced(door: Door) -> Iterator[list[Any]]:
    body = [nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)]
    model = door(nn.Sequential(*body))
    yield from classify(model, 6, 3, 6)
    model[2].p = 0.4
    yield from classify(model, 6, 3, 6)
    model[3] = nn.Linear(16, 3)
    yield from classify(model, 6, 3, 8)


@script()
def dtypes_changed(door: Door) -> Iterator[list[Any]]:
    model, x = door(mlp(6, 16, 3).eval()), torch.randn(4, 6)
    with torch.no_grad():
        for dtype in (torch.float32, torch.float64, torch.float32):
            model.to(dtype)
            for _ in range(4):
                yield [model(x.to(dtype))]


# Copies that pickle makes have no code.
@script(doors=("dispatch",))
def copies(door: Door) -> Iterator[list[Any]]:
    model = door(mlp(6, 16, 3))
    yield from classify(model, 6, 3, 5)
    copied, unpickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded, x = torch.load(file, weights_only=False), torch.randn(4, 6)
    for _ in range(5):
        yield [each(x) for each in (copied, unpickled, loaded, model)]
        with torch.no_grad():
            for p in copied.parameters():
                p.mul_(0.9)


class _Named(NamedTuple):
    logits: Tensor
    hidden: Tensor | None = None


@dataclass
class _Fields:
    logits: Tensor
    hidden: list[Tensor] = field(default_factory=list)


class _Forms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, *, x: Tensor, mask: Tensor | None = None, form: str = "dict") -> Any:
        hidden = self.first(x).tanh()
        if mask is not None:
            hidden = hidden * mask
        logits = self.second(hidden)
        if form == "dict":
            return {"logits": logits, "nested": {"hidden": [hidden, (hidden.sum(),)]}, "n": 3}
        if form == "named":
            return _Named(logits)
        return _Fields(logits, [hidden]) if form == "fields" else OrderedDict(logits=logits)


@script()
def forms_of_results(door: Door) -> Iterator[list[Any]]:
    model = door(_Forms())
    optimizer = sgd(model)
    for i in range(16):
        form = ("dict", "named", "fields", "ordered")[i // 4]
        result = model(x=torch.randn(4, 6), form=form)
        logits = result["logits"] if isinstance(result, dict) else result.logits
        yield [stepped(optimizer, logits.square().mean())]


@script()
def norm_added_and_removed(door: Door) -> Iterator[list[Any]]:
    model = door(mlp(6, 16, 3))
    yield from classify(model, 6, 3, 5)
    nn.utils.parametrizations.weight_norm(model[0])
    yield from classify(model, 6, 3, 8)
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    yield from classify(model, 6, 3, 8)


@script()
def pruned_midway(door: Door) -> Iterator[list[Any]]:
    model = door(mlp(6, 16, 3))
    yield from classify(model, 6, 3, 5)
    nn.utils.prune.random_unstructured(model[0], "weight", 0.3)
    yield from classify(model, 6, 3, 8)
    nn.utils.prune.remove(model[0], "weight")
    yield from classify(model, 6, 3, 8)


def _keep(layer: nn.Module, args: Any, output: Tensor) -> None:
    layer.output = output  # type: ignore[assignment]


@script()
def hook_that_keeps_features(door: Door) -> Iterator[list[Any]]:
    model = mlp(6, 16, 3)
    model[0].register_forward_hook(_keep)
    optimizer = sgd(door(model))
    for _ in range(STEPS):
        loss = model(torch.randn(4, 6)).square().mean() + model[0].output.abs().mean()
        yield [stepped(optimizer, loss)]


@script()
def hook_added_and_removed(door: Door) -> Iterator[list[Any]]:
    model = door(mlp(6, 16, 3))
    yield from classify(model, 6, 3, 5)
    handle = model[0].register_forward_hook(lambda layer, args, output: output * 0.5)
    yield from classify(model, 6, 3, 8)
    handle.remove()
    yield from classify(model, 6, 3, 8)


@script()
def penalty_with_batch_norm(door: Door) -> Iterator[list[Any]]:
    body = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)
    model = door(nn.Sequential(*body))
    optimizer = sgd(model)
    for _ in range(STEPS):
        x = torch.randn(8, 6, requires_grad=True)
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        loss = y.square().mean() + (slope.norm(dim=1) - 1).square().mean()
        yield [stepped(optimizer, loss), model[1].running_mean]


@script()
def penalty_with_spectral_norm(door: Door) -> Iterator[list[Any]]:
    norm = nn.utils.parametrizations.spectral_norm
    model = door(nn.Sequential(norm(nn.Linear(6, 8)), nn.Tanh(), norm(nn.Linear(8, 1))))
    optimizer = sgd(model)
    for _ in range(STEPS):
        real, fake = torch.randn(8, 6), torch.randn(8, 6)
        mixed = torch.lerp(real, fake, torch.rand(8, 1)).requires_grad_()
        loss = model(fake).mean() - model(real).mean()
        (slope,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
        yield [stepped(optimizer, loss + (slope.norm(dim=1) - 1).square().mean())]


class _Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Linear(6, 3)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for p, q in zip(self.target.parameters(), self.online.parameters(), strict=True):
                p.data = p.data * 0.9 + q.data * 0.1
        return self.online(x) - self.target(x)


# One graph of torch.compile cannot assign to .data.
@script(compiled=0.0)
def average_in_forward(door: Door) -> Iterator[list[Any]]:
    model = door(_Averaged())
    optimizer = sgd(model)
    for _ in range(STEPS):
        loss = stepped(optimizer, model(torch.randn(4, 6)).square().mean())
        yield [loss, model.target.weight]


# Each value of the smoothing is a constant of a graph of TorchDynamo.
@script(compiled=0.0)
def smoothing_schedule(door: Door) -> Iterator[list[Any]]:
    class Smoothed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.loss = mlp(6, 16, 3), nn.CrossEntropyLoss(label_smoothing=0.0)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.loss(self.body(x), y)

    model = door(Smoothed())
    optimizer = sgd(model)
    for i in range(STEPS):
        model.loss.label_smoothing = 0.02 * i
        loss = model(torch.randn(5, 6), torch.randint(0, 3, (5,)))
        yield [stepped(optimizer, loss)]


class _Taught(nn.Module):
    """A teacher whose decay grows with the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.student = mlp(6, 16, 3)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        decay = min(1 - 1 / (self.step + 1), 0.99)
        with torch.no_grad():
            for p, q in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                p.mul_(decay).add_(q, alpha=1 - decay)
        self.step += 1
        return F.mse_loss(self.student(x).softmax(-1), self.teacher(x + 0.1).softmax(-1))


# TorchDynamo makes a constant of each step.
@script(compiled=0.0)
def teacher_in_forward(door: Door) -> Iterator[list[Any]]:
    model = door(_Taught())
    optimizer = sgd(model)
    for _ in range(STEPS):
        loss = stepped(optimizer, model(torch.randn(5, 6)))
        yield [loss, *model.teacher.parameters()]


class _Printing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(6, 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        print(f"{tuple(y.shape)} {y.mean().item():.3f}")
        return y


@script()
def prints(door: Door) -> Iterator[list[Any]]:
    model = door(_Printing())
    optimizer = sgd(model)
    for _ in range(STEPS):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            y = model(torch.randn(4, 6))
        yield [stepped(optimizer, y.square().mean()), printed.getvalue().count("(4, 3)")]


@dataclass
class _Batch:
    x: Tensor
    y: Tensor
    loss: Any = None


class _OfBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(6, 16, 3)

    def forward(self, batch: _Batch) -> _Batch:
        batch.loss = F.cross_entropy(self.body(batch.x), batch.y)
        return batch


@script()
def batch_of_an_unknown_class(door: Door) -> Iterator[list[Any]]:
    model = door(_OfBatch())
    optimizer = sgd(model)
    for i in range(STEPS):
        rows = 4 + i % 3
        batch = model(_Batch(torch.randn(rows, 6), torch.randint(0, 3, (rows,))))
        yield [stepped(optimizer, batch.loss)]
