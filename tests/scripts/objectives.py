"""Scripts with losses of their own, closures, gradients of inputs, and scaled gradients."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vmap

from tests.scripts.script import Door, script
from tests.scripts.training import mlp, stepped

STEPS = 12


class _Focal(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.gamma = 2.0
        self.register_buffer("seen", torch.ones(classes))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.training:
            self.seen += torch.bincount(labels, minlength=self.seen.numel())
        weights = self.seen.sum() / self.seen
        taken = logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
        return (-weights[labels] * (1 - taken.exp()) ** self.gamma * taken).mean()


@script()
def focal_loss(door: Door) -> Iterator[list[Any]]:
    """The loss is a dispatched module too, and counts the labels that it has seen."""
    model, loss_of = door(mlp(6, 16, 4)), door(_Focal(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5)
    for i in range(STEPS):
        loss = loss_of(model(torch.randn(8, 6)), torch.randint(0, 4, (8,)))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        if i == 7:
            loss_of.gamma = 1.0
        yield [loss, loss_of.seen]


class _Centers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(4, 8))
        self.temperature = nn.Parameter(torch.tensor(0.0))

    def forward(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        near = (features - self.centers[labels]).square().sum(-1).mean()
        distances = torch.cdist(features, self.centers)
        far = F.relu(1 - distances.scatter(1, labels[:, None], 9.0).min(-1).values).mean()
        scale = self.temperature.exp()
        return {"near": near * scale, "far": far * scale, "scale": scale.log().square()}


@script()
def center_loss(door: Door) -> Iterator[list[Any]]:
    """A loss with parameters, an optimizer for it, and a dict of terms that are weighted."""
    model, loss_of = door(mlp(6, 16, 8)), door(_Centers())
    optimizers = (
        torch.optim.Adam(model.parameters(), 1e-2),
        torch.optim.SGD(loss_of.parameters(), 0.1),
    )
    weights = {"near": 1.0, "far": 0.5, "scale": 0.1}
    for _ in range(STEPS):
        terms = loss_of(model(torch.randn(8, 6)), torch.randint(0, 4, (8,)))
        loss = sum(weights[name] * term for name, term in terms.items())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        yield [loss, *terms.values()]


@script(bound=2e-3)
def scaled_half(door: Door) -> Iterator[list[Any]]:
    """Float16 autocast on the CPU with an enabled GradScaler, and gradients clipped unscaled."""
    model = door(mlp(6, 16, 16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4)
    for i in range(STEPS):
        x = torch.randn(8, 6) * (1e6 if i == 6 else 1.0)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x).float(), torch.randint(0, 4, (8,)))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield [loss if i != 6 else 0, scaler.get_scale()]


@script(bound=1e-3)
def lbfgs(door: Door) -> Iterator[list[Any]]:
    """An optimizer calls a closure several times for a step; in float64."""
    model = door(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double())
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.5, max_iter=6, line_search_fn="strong_wolfe"
    )
    x = torch.randn(32, 3).double()
    y = x.prod(-1, keepdim=True)
    for _ in range(6):

        def closure() -> Any:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        yield [optimizer.step(closure)]


class _Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 1)
        )

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return self.body(torch.cat([t, x], -1))


@script(bound=1e-4)
def physics_informed(door: Door) -> Iterator[list[Any]]:
    """The residual of the heat equation: first and second derivatives by inputs are trained."""
    model = door(_Field())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        t, x = (torch.rand(16, 1, requires_grad=True) for _ in "tx")
        u = model(t, x)
        one = torch.ones_like(u)
        u_t, u_x = torch.autograd.grad(u, (t, x), one, create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x, x, one, create_graph=True)
        loss = (u_t - 0.1 * u_xx).square().mean() + (u[:4] - 1).square().mean()
        yield [stepped(optimizer, loss)]


@script()
def adversarial(door: Door) -> Iterator[list[Any]]:
    """Projected gradient descent on the inputs in eval mode, then a training step."""
    norm = nn.Sequential(
        nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1)
    )
    model = door(nn.Sequential(*norm, nn.Linear(16, 3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(STEPS):
        x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
        model.eval()
        step = torch.zeros_like(x)
        for _ in range(3):
            step.requires_grad_()
            (slope,) = torch.autograd.grad(F.cross_entropy(model(x + step), y), step)
            step = (step + 0.02 * slope.sign()).clamp(-0.05, 0.05).detach()
        model.train()
        loss = F.cross_entropy(model(x + step), y)
        yield [stepped(optimizer, loss)]


@script()
def r_drop(door: Door) -> Iterator[list[Any]]:
    """Two calls with other dropout masks, and hooks on their results that clamp gradients."""
    model = door(nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 4)))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(STEPS):
        x, y = torch.randn(8, 6), torch.randint(0, 4, (8,))
        a, b = model(x), model(x)
        for logits in (a, b):
            logits.register_hook(lambda g: g.clamp(-0.02, 0.02))
        both = F.cross_entropy(a, y) + F.cross_entropy(b, y)
        apart = F.kl_div(
            a.log_softmax(-1), b.log_softmax(-1), log_target=True, reduction="batchmean"
        )
        loss = both + 0.5 * apart
        yield [stepped(optimizer, loss)]


@script()
def optimizer_in_backward(door: Door) -> Iterator[list[Any]]:
    """Each parameter has an optimizer that steps as soon as its gradient is there."""
    model = door(mlp(6, 16, 16, 3))
    optimizers = {p: torch.optim.Adam([p], 1e-2, foreach=False) for p in model.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(STEPS):
        loss = F.cross_entropy(model(torch.randn(8, 6)), torch.randint(0, 3, (8,)))
        loss.backward()
        yield [loss]


@script(least=0.4)
def private_gradients(door: Door) -> Iterator[list[Any]]:
    """Gradients of each sample by vmap of grad, clipped and summed, beside plain evaluation."""
    model = door(mlp(6, 16, 3))
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))

    def loss_of(parameters: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (a[None],)), b[None])

    for _ in range(STEPS):
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        each = vmap(grad(loss_of), (None, 0, 0))(parameters, x, y)
        size = sum(g.flatten(1).square().sum(1) for g in each.values()).sqrt()
        with torch.no_grad():
            for name, p in model.named_parameters():
                factor = (1 / size).clamp(max=1).view(-1, *[1] * p.dim())
                p -= 0.05 * (each[name] * factor).mean(0)
            yield [model(x)]


@script(least=0.3)
def derivatives_of_functions(door: Door) -> Iterator[list[Any]]:
    """jacrev, hessian and jvp of a model, and an ensemble of models by vmap; plain calls beside."""
    model = door(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)))
    others = [nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(3)]
    stacked = stack_module_state(others)
    for _ in range(8):
        x = torch.randn(5, 3)
        jacobian = vmap(jacrev(model))(x)
        bent = hessian(lambda a: model(a).sum())(x[0])
        value, slope = jvp(model, (x,), (torch.ones_like(x),))
        ensemble = vmap(lambda p, b, a: functional_call(others[0], (p, b), (a,)), (0, 0, None))
        with torch.no_grad():
            yield [model(x), model(x), jacobian, bent, value, slope, ensemble(*stacked, x)]


@script(least=0.0)
def teacher_forcing(door: Door) -> Iterator[list[Any]]:
    """A decoder that takes its own words or the given ones, by Python's random numbers."""
    random.seed(0)
    model = door(_Decoder())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for i in range(20):
        words = torch.randint(0, 20, (4, 6))
        logits = model(words, 1.0 if i < 5 else 0.5)
        loss = F.cross_entropy(logits.flatten(0, 1), words.flatten())
        yield [stepped(optimizer, loss)]


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(20, 8), nn.GRUCell(8, 16), nn.Linear(16, 20)

    def forward(self, words: Tensor, given: float) -> Tensor:
        state, word, found = words.new_zeros(len(words), 16).float(), words[:, 0], []
        for i in range(words.shape[1]):
            state = self.cell(self.words(word), state)
            found.append(self.head(state))
            word = words[:, i] if random.random() < given else found[-1].argmax(-1)
        return torch.stack(found, 1)
