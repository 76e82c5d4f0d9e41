"""Scripts of training: several optimizers, teachers, norms of weights, checkpoints, freezing."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.scripts.script import Door, script

STEPS = 12


def stepped(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    """Make one step of the optimizer; return the loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


@script()
def gan(door: Door) -> Iterator[list[Any]]:
    g, d = door(mlp(4, 32, 10)), door(mlp(10, 32, 1))
    a, b = (torch.optim.Adam(m.parameters(), lr=2e-4, betas=(0.5, 0.999)) for m in (g, d))
    ones, zeros = torch.ones(8, 1), torch.zeros(8, 1)
    for _ in range(STEPS):
        fake = g(torch.randn(8, 4))
        b.zero_grad()
        real = F.binary_cross_entropy_with_logits(d(torch.randn(8, 10)), ones)
        loss_d = real + F.binary_cross_entropy_with_logits(d(fake.detach()), zeros)
        loss_d.backward()
        b.step()
        a.zero_grad()
        loss_g = F.binary_cross_entropy_with_logits(d(fake), ones)
        loss_g.backward()
        a.step()
        yield [loss_d, loss_g]


@script()
def wgan_gp(door: Door) -> Iterator[list[Any]]:
    g, d = door(mlp(4, 32, 10)), door(mlp(10, 32, 1))
    a, b = (torch.optim.Adam(m.parameters(), lr=1e-4) for m in (g, d))
    for i in range(STEPS):
        real, fake = torch.randn(8, 10), g(torch.randn(8, 4))
        mixed = torch.lerp(real, fake.detach(), torch.rand(8, 1)).requires_grad_()
        slope = torch.autograd.grad(d(mixed).sum(), mixed, create_graph=True)[0]
        penalty = (slope.norm(2, dim=1) - 1).square().mean()
        loss_d = d(fake.detach()).mean() - d(real).mean() + 10 * penalty
        b.zero_grad()
        loss_d.backward()
        b.step()
        yield [loss_d, penalty]
        if i % 3 == 2:
            loss_g = -d(g(torch.randn(8, 4))).mean()
            a.zero_grad()
            loss_g.backward()
            a.step()


@script()
def frozen_critic(door: Door) -> Iterator[list[Any]]:
    """A GAN that turns off the critic's gradients while the generator trains."""
    g, d = door(mlp(4, 32, 10)), door(mlp(10, 32, 1))
    a, b = (torch.optim.SGD(m.parameters(), lr=1e-2) for m in (g, d))
    for _ in range(STEPS):
        d.requires_grad_(True)
        loss_d = d(g(torch.randn(8, 4)).detach()).mean() - d(torch.randn(8, 10)).mean()
        b.zero_grad()
        loss_d.backward()
        b.step()
        d.requires_grad_(False)
        loss_g = -d(g(torch.randn(8, 4))).mean()
        a.zero_grad()
        loss_g.backward()
        a.step()
        yield [loss_d, loss_g]


class _Byol(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # A bias before batch norm has a gradient of rounding alone, which AdamW enlarges.
        first = nn.Linear(12, 16, bias=False)
        self.online = nn.Sequential(first, nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.target = copy.deepcopy(self.online)
        for p in self.target.parameters():
            p.requires_grad = False
        self.predictor = nn.Linear(8, 8)

    @torch.no_grad()
    def update(self, rate: float) -> None:
        for p, q in zip(self.target.parameters(), self.online.parameters(), strict=True):
            p.data.mul_(rate).add_(q.data, alpha=1 - rate)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        loss: Any = 0
        for x, y in ((a, b), (b, a)):
            with torch.no_grad():
                target = self.target(y)
            loss = loss + 2 - 2 * F.cosine_similarity(self.predictor(self.online(x)), target, -1)
        return loss.mean()


@script()
def byol(door: Door) -> Iterator[list[Any]]:
    model = door(_Byol())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for i in range(STEPS):
        loss = model(torch.randn(8, 12), torch.randn(8, 12))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.update(0.9 + 0.005 * i)
        yield [loss, *model.target.parameters()]


@script()
def ema_copy(door: Door) -> Iterator[list[Any]]:
    model = door(mlp(6, 16, 3))
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        x = torch.randn(8, 6)
        with torch.no_grad():
            wanted = teacher(x).softmax(-1)
        loss = F.cross_entropy(model(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        with torch.no_grad():
            for p, q in zip(teacher.parameters(), model.parameters(), strict=True):
                p.lerp_(q, 0.1)
        yield [loss, average(x)]


@script()
def spectral_norm(door: Door) -> Iterator[list[Any]]:
    norm = nn.utils.parametrizations.spectral_norm
    model = door(nn.Sequential(norm(nn.Linear(6, 16)), nn.ReLU(), norm(nn.Linear(16, 2))))
    yield from classify(model, 6, 2)
    model.eval()
    with torch.no_grad():
        for _ in range(3):
            yield [model(torch.randn(4, 6))]


@script()
def old_spectral_norm(door: Door) -> Iterator[list[Any]]:
    norm = nn.utils.spectral_norm
    model = door(nn.Sequential(norm(nn.Conv1d(2, 4, 3)), nn.Flatten(), norm(nn.Linear(16, 2))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        loss = F.cross_entropy(model(torch.randn(5, 2, 6)), torch.randint(0, 2, (5,)))
        yield [stepped(optimizer, loss)]


@script()
def weight_norm(door: Door) -> Iterator[list[Any]]:
    norms = nn.utils.parametrizations.weight_norm, nn.utils.weight_norm
    model = nn.Sequential(norms[0](nn.Linear(6, 16)), nn.ReLU(), norms[1](nn.Linear(16, 2)))
    yield from classify(door(model), 6, 2)


@script()
def orthogonal(door: Door) -> Iterator[list[Any]]:
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))
    yield from classify(door(nn.Sequential(nn.Linear(6, 8), layer)), 6, 8)


class _Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@script()
def own_parametrization(door: Door) -> Iterator[list[Any]]:
    layer = nn.Linear(6, 6)
    nn.utils.parametrize.register_parametrization(layer, "weight", _Symmetric())
    yield from classify(door(nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 2))), 6, 2)


@script()
def pruned(door: Door) -> Iterator[list[Any]]:
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    nn.utils.prune.l1_unstructured(model[0], "weight", amount=0.4)
    yield from classify(door(model), 6, 2)


def classify(model: Any, width: int, classes: int, steps: int = STEPS) -> Iterator[list[Any]]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(steps):
        loss = F.cross_entropy(model(torch.randn(8, width)), torch.randint(0, classes, (8,)))
        yield [stepped(optimizer, loss)]


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return self.head(x)


@script()
def checkpointed(door: Door) -> Iterator[list[Any]]:
    yield from classify(door(_Deep()), 8, 3)


@script()
def gradual_unfreezing(door: Door) -> Iterator[list[Any]]:
    model = door(mlp(6, 16, 16, 3))
    for layer in model[:-1]:
        layer.requires_grad_(False)
    for i in (2, 0):
        yield from classify(model, 6, 3, 10)
        model[i].requires_grad_(True)
    yield from classify(model, 6, 3, 10)


@script()
def accumulated(door: Door) -> Iterator[list[Any]]:
    """Gradient accumulation with a learning-rate schedule, clipping, a validation loop, resume."""
    first = nn.Linear(6, 16, bias=False)  # AdamW enlarges the rounding of a bias before batch norm
    model = door(nn.Sequential(first, nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)
    best = float("inf")
    for epoch in range(4):
        model.train()
        for i in range(8):
            loss = F.cross_entropy(
                model(torch.randn(8, 6)), torch.randint(0, 3, (8,)), label_smoothing=0.1
            )
            (loss / 2).backward()
            if i % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad(set_to_none=True)
            yield [loss]
        model.eval()
        with torch.no_grad():
            total = sum(
                F.cross_entropy(model(torch.randn(n, 6)), torch.zeros(n).long()) for n in (8, 8, 3)
            )
        yield [total]
        best = min(best, float(total))
        saved = io.BytesIO()
        torch.save(model.state_dict(), saved)
        saved.seek(0)
        model.load_state_dict(torch.load(saved))
        if epoch == 1:
            model.load_state_dict(
                {k: v * 0.5 if v.is_floating_point() else v for k, v in model.state_dict().items()}
            )


@script(bound=2e-2)
def autocast(door: Door) -> Iterator[list[Any]]:
    model = door(
        nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(torch.randn(4, 3, 8, 8)), torch.randint(0, 4, (4,)))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield [loss]
