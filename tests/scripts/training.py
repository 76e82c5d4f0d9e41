"""Scripts of training: several optimizers, teachers, norms of weights, checkpoints, freezing."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.scripts.script import Door, script

STEPS = 12


def _mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


@script()
def gan(door: Door) -> Iterator[list[Any]]:
    g, d = door(_mlp(4, 32, 10)), door(_mlp(10, 32, 1))
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
    g, d = door(_mlp(4, 32, 10)), door(_mlp(10, 32, 1))
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
    g, d = door(_mlp(4, 32, 10)), door(_mlp(10, 32, 1))
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
    model = door(_mlp(6, 16, 3))
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
    yield from _classify(model, 6, 2)
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
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield [loss]


@script()
def weight_norm(door: Door) -> Iterator[list[Any]]:
    norms = nn.utils.parametrizations.weight_norm, nn.utils.weight_norm
    model = nn.Sequential(norms[0](nn.Linear(6, 16)), nn.ReLU(), norms[1](nn.Linear(16, 2)))
    yield from _classify(door(model), 6, 2)


@script()
def orthogonal(door: Door) -> Iterator[list[Any]]:
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))
    yield from _classify(door(nn.Sequential(nn.Linear(6, 8), layer)), 6, 8)


class _Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@script()
def own_parametrization(door: Door) -> Iterator[list[Any]]:
    layer = nn.Linear(6, 6)
    nn.utils.parametrize.register_parametrization(layer, "weight", _Symmetric())
    yield from _classify(door(nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 2))), 6, 2)


@script()
def pruned(door: Door) -> Iterator[list[Any]]:
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    nn.utils.prune.l1_unstructured(model[0], "weight", amount=0.4)
    yield from _classify(door(model), 6, 2)


def _classify(model: Any, width: int, classes: int, steps: int = STEPS) -> Iterator[list[Any]]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(steps):
        loss = F.cross_entropy(model(torch.randn(8, width)), torch.randint(0, classes, (8,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield [loss]


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
    yield from _classify(door(_Deep()), 8, 3)


@script()
def gradual_unfreezing(door: Door) -> Iterator[list[Any]]:
    model = door(_mlp(6, 16, 16, 3))
    for layer in model[:-1]:
        layer.requires_grad_(False)
    for i in (2, 0):
        yield from _classify(model, 6, 3, 10)
        model[i].requires_grad_(True)
    yield from _classify(model, 6, 3, 10)


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


class _Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes = nn.Linear(6, 3), 3

    def forward(self, x: Tensor, labels: Tensor | None = None, return_dict: bool = True) -> Any:
        logits = self.body(x)
        loss = None
        if labels is not None:
            if labels.dtype == torch.long:
                loss = F.cross_entropy(logits.view(-1, self.classes), labels.view(-1))
            else:
                loss = F.mse_loss(logits, labels)
        if not return_dict:
            return (loss, logits) if loss is not None else (logits,)
        return {"loss": loss, "logits": logits}


# Six signatures, of which four are compiled.
@script(least=0.6)
def labels_or_none(door: Door) -> Iterator[list[Any]]:
    model = door(_Loss())
    for i in range(16):
        labels = (torch.randint(0, 3, (8,)), torch.randn(8, 3), None)[i % 3]
        out = model(torch.randn(8, 6), labels=labels, return_dict=i % 2 == 0)
        loss = out["loss"] if isinstance(out, dict) else out[0]
        loss = out["logits"].sum() if loss is None else loss.mean()
        loss.backward()
        yield [loss, *(p.grad for p in model.parameters())]
        model.zero_grad()


class _Regularized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)

    def forward(self, x: Tensor, rate: float, epoch: int = 0) -> Tensor:
        y = self.body(x)
        return (y.square().mean() + rate * self.body.weight.abs().sum()) * (0.9**epoch)


@script()
def numbers_given(door: Door) -> Iterator[list[Any]]:
    model = door(_Regularized())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
    for i in range(16):
        loss = model(torch.randn(8, 6), schedule.get_last_lr()[0], epoch=i // 4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        yield [loss]


@script()
def layer_groups(door: Door) -> Iterator[list[Any]]:
    """L-BFGS with closures, after Adam."""
    model = door(_mlp(4, 8, 1))
    x, y = torch.randn(16, 4), torch.randn(16, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(6):
        yield [optimizer.step(closure)]


@script()
def sharpness_aware(door: Door) -> Iterator[list[Any]]:
    model = door(_mlp(4, 8, 1))
    for _ in range(STEPS):
        x, y = torch.randn(16, 4), torch.randn(16, 1)
        F.mse_loss(model(x), y).backward()
        grads = [p.grad.clone() for p in model.parameters()]
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p.add_(g, alpha=0.05)
        model.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p.sub_(g, alpha=0.05)
                p.sub_(p.grad, alpha=0.1)
        model.zero_grad()
        yield [loss]


class _PerSample(nn.Module):
    """A forward with torch.func: gradients for each sample, and a Jacobian."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3) * 0.3)

    def energy(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight).square().sum()

    def forward(self, x: Tensor) -> Tensor:
        force = torch.func.vmap(torch.func.grad(self.energy))(x)
        return force.square().mean() + torch.func.vmap(self.energy)(x).mean()


# Refused: torch.func differentiates in forward.
@script(least=0.0)
def func_grad_vmap(door: Door) -> Iterator[list[Any]]:
    model = door(_PerSample())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        loss = model(torch.randn(5, 6))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield [loss]


class _Forces(nn.Module):
    """Energies and forces by autograd.grad inside of forward, as in interatomic potentials."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _mlp(3, 16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.requires_grad_(True)
            energy = self.body(torch.tanh(x)).sum()
            force = -torch.autograd.grad(energy, x, create_graph=self.training)[0]
        return energy, force


# Refused: torch.autograd.grad in forward.
@script(least=0.0)
def forces(door: Door) -> Iterator[list[Any]]:
    model = door(_Forces())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        energy, force = model(torch.randn(7, 3))
        loss = energy.square() + force.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield [loss, force]


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float) -> Tensor:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -ctx.alpha * grad, None


class _Domain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.label, self.domain = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
        h = self.body(x).relu()
        return self.label(h), self.domain(_Reverse.apply(h, alpha))


# The number is kept in the context of a custom function.
@script(least=0.0)
def gradient_reversal(door: Door) -> Iterator[list[Any]]:
    model = door(_Domain())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for i in range(16):
        label, domain = model(torch.randn(8, 6), 2 / (1 + 2.7 ** (-i)) - 1)
        loss = F.cross_entropy(label, torch.randint(0, 3, (8,)))
        loss = loss + F.cross_entropy(domain, torch.randint(0, 2, (8,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield [loss]


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return (x / scale).round().clamp(-8, 7) * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        inside = ((x / scale) >= -8) & ((x / scale) <= 7)
        return grad * inside, (grad * ((x / scale).round() - x / scale)).sum()


class _Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, _Round.apply(self.first.weight, self.scale), self.first.bias)
        w = self.second.weight
        step = w.detach().abs().max() / 7
        fake = torch.fake_quantize_per_tensor_affine(
            w, step, torch.zeros(1, dtype=torch.int32), -8, 7
        )
        return F.linear(h.relu(), fake, self.second.bias)


@script()
def quantization_aware(door: Door) -> Iterator[list[Any]]:
    yield from _classify(door(_Quantized()), 6, 3)


# FakeQuantize branches by the values of its buffers.
@script(least=0.0)
def observers(door: Door) -> Iterator[list[Any]]:
    """QAT with PyTorch's FakeQuantize, whose observers write buffers."""
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    fake = FakeQuantize(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    model = door(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), fake, nn.Linear(8, 3)))
    yield from _classify(model, 6, 3)


class _Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = _mlp(6, 16, 8)
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        x, y = (F.normalize(self.body(t), dim=-1) for t in (a, b))
        logits = self.scale.exp().clamp(max=100) * x @ y.T
        target = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


@script()
def contrastive(door: Door) -> Iterator[list[Any]]:
    model = door(_Siamese())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for n in (8,) * 8 + (5,) + (8,) * 5:
        loss = model(torch.randn(n, 6), torch.randn(n, 6))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield [loss]


@script()
def maml(door: Door) -> Iterator[list[Any]]:
    """Inner steps by functional_call, as meta learning does."""
    model = door(_mlp(3, 8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(8):
        weights = dict(model.named_parameters())
        x, y = torch.randn(6, 3), torch.randn(6, 1)
        inner = F.mse_loss(torch.func.functional_call(model, weights, x), y)
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {k: w - 0.1 * g for (k, w), g in zip(weights.items(), grads, strict=True)}
        loss = F.mse_loss(torch.func.functional_call(model, fast, x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield [loss]
