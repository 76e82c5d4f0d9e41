"""Scripts of training with functions, numbers and derivatives of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.script import Door, script
from tests.scripts.training import STEPS, classify, mlp, stepped


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
    model = door(mlp(4, 8, 1))
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
    model = door(mlp(4, 8, 1))
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
        yield [stepped(optimizer, loss)]


class _Forces(nn.Module):
    """Energies and forces by autograd.grad inside of forward, as in interatomic potentials."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(3, 16, 1)

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
        yield [stepped(optimizer, loss), force]


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


# TorchDynamo makes a constant of each number that a custom function gets.
@script(compiled=0.0)
def gradient_reversal(door: Door) -> Iterator[list[Any]]:
    model = door(_Domain())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for i in range(16):
        label, domain = model(torch.randn(8, 6), 2 / (1 + 2.7 ** (-i)) - 1)
        loss = F.cross_entropy(label, torch.randint(0, 3, (8,)))
        loss = loss + F.cross_entropy(domain, torch.randint(0, 2, (8,)))
        yield [stepped(optimizer, loss)]


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
    yield from classify(door(_Quantized()), 6, 3)


# FakeQuantize branches by the values of its buffers.
@script(least=0.0)
def observers(door: Door) -> Iterator[list[Any]]:
    """QAT with PyTorch's FakeQuantize, whose observers write buffers."""
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    fake = FakeQuantize(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    model = door(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), fake, nn.Linear(8, 3)))
    yield from classify(model, 6, 3)


class _Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(6, 16, 8)
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
        yield [stepped(optimizer, loss)]


@script()
def maml(door: Door) -> Iterator[list[Any]]:
    """Inner steps by functional_call, as meta learning does."""
    model = door(mlp(3, 8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(8):
        weights = dict(model.named_parameters())
        x, y = torch.randn(6, 3), torch.randn(6, 1)
        inner = F.mse_loss(torch.func.functional_call(model, weights, x), y)
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {k: w - 0.1 * g for (k, w), g in zip(weights.items(), grads, strict=True)}
        loss = F.mse_loss(torch.func.functional_call(model, fast, x), y)
        yield [stepped(optimizer, loss)]
