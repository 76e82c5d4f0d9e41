"""Scripts of models with codebooks, solvers, own outputs, generated weights, and text arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from tests.scripts.script import Door, script
from tests.scripts.training import classify, mlp, stepped

STEPS = 12


class _Quantizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(10, 4))
        self.register_buffer("sizes", torch.ones(10))
        self.register_buffer("sums", self.codes.clone())
        self.enter, self.leave = nn.Linear(6, 4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.enter(x)
        index = torch.cdist(z, self.codes).argmin(-1)
        if self.training:
            with torch.no_grad():
                one = F.one_hot(index, 10).to(z.dtype)
                self.sizes.mul_(0.9).add_(one.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(one.T @ z, alpha=0.1)
                self.codes.copy_(self.sums / self.sizes.clamp_min(1e-3)[:, None])
        code = self.codes[index]
        loss = F.mse_loss(z, code.detach())
        return self.leave(z + (code - z).detach()), loss, index


@script()
def vq_with_averages(door: Door) -> Iterator[list[Any]]:
    model = door(_Quantizer())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(STEPS):
        x = torch.randn(8, 6)
        found, commitment, index = model(x)
        loss = F.mse_loss(found, x) + 0.25 * commitment
        yield [stepped(optimizer, loss), index, model.codes]


class _Equilibrium(nn.Module):
    """Iterates to a fixed point without gradients; a last step has them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(8, 8), nn.Linear(6, 8), nn.Linear(8, 3)
        with torch.no_grad():
            self.inner.weight *= 0.3

    def forward(self, x: Tensor) -> Tensor:
        given = self.outer(x)
        with torch.no_grad():
            z = torch.zeros_like(given)
            for _ in range(30):
                new = torch.tanh(self.inner(z) + given)
                if (new - z).abs().max() < 1e-4:
                    break
                z = new
        return self.head(torch.tanh(self.inner(z) + given))


@script(least=0.0)
def equilibrium(door: Door) -> Iterator[list[Any]]:
    yield from classify(door(_Equilibrium()), 6, 3)


class _Found(NamedTuple):
    mean: Tensor
    quantiles: Tensor
    extra: dict[str, Tensor] | None = None


class _Quantiles(nn.Module):
    levels = (0.1, 0.5, 0.9)

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean = mlp(6, 16), nn.Linear(16, 1)
        self.heads = nn.ModuleDict(
            {str(q).replace(".", "_"): nn.Linear(16, 1) for q in self.levels}
        )

    def forward(self, x: Tensor, details: bool = False) -> _Found:
        h = F.elu(self.body(x))
        quantiles = torch.cat([head(h) for head in self.heads.values()], -1)
        extra = {"features": h, "spread": quantiles[:, -1] - quantiles[:, 0]} if details else None
        return _Found(self.mean(h), quantiles, extra)


@script()
def quantile_heads(door: Door) -> Iterator[list[Any]]:
    """Named tuples with an optional dict; the state is exported midway into a plain copy."""
    model = door(_Quantiles())
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-2)
    levels = torch.tensor(model.levels)
    for i in range(20):
        x = torch.randn(8, 6)
        y = x.sum(1, keepdim=True)
        out = model(x, details=i % 4 == 3)
        over = y - out.quantiles
        loss = F.huber_loss(out.mean, y) + torch.maximum(levels * over, (levels - 1) * over).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        plain = _Quantiles()
        plain.load_state_dict(model.state_dict())
        yield [loss, out.extra, plain(x)]


@dataclasses.dataclass
class _Mixed:
    distribution: MixtureSameFamily
    logits: Tensor


class _MixtureDensity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(3, 16, 5 * (1 + 2 * 2))

    def forward(self, x: Tensor) -> _Mixed:
        logits, mean, scale = self.body(x).split([5, 10, 10], -1)
        shape = (*x.shape[:-1], 5, 2)
        parts = Independent(Normal(mean.view(shape), F.softplus(scale.view(shape)) + 1e-3), 1)
        return _Mixed(MixtureSameFamily(Categorical(logits=logits), parts), logits)


@script()
def mixture_density(door: Door) -> Iterator[list[Any]]:
    model = door(_MixtureDensity())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(STEPS):
        out = model(torch.randn(8, 3))
        loss = -out.distribution.log_prob(torch.randn(8, 2)).mean()
        yield [stepped(optimizer, loss), out.logits, out.distribution.sample()]


class _Hyper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_task, self.makes = nn.Embedding(3, 4), nn.Linear(4, 6 * 5 + 5)

    def forward(self, x: Tensor, task: int) -> Tensor:
        made = self.makes(self.of_task.weight[task])
        return F.linear(x, made[:30].view(5, 6), made[30:]).relu()


@script()
def hypernetwork(door: Door) -> Iterator[list[Any]]:
    """Weights are generated for a task, whose number is a Python int."""
    model = door(_Hyper())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(24):
        loss = model(torch.randn(8, 6), i % 3).square().mean()
        yield [stepped(optimizer, loss)]


class _Domains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(6, 16)
        self.norms = nn.ModuleDict({name: nn.BatchNorm1d(16) for name in ("photo", "sketch")})
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor, domain: str = "photo") -> Tensor:
        return self.head(self.norms[domain](self.body(x)).relu())


@script()
def domain_norms(door: Door) -> Iterator[list[Any]]:
    """A text chooses the batch norm, whose momentum is lowered midway."""
    model = door(_Domains())
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    for i in range(30):
        if i == 15:
            for norm in model.norms.values():
                norm.momentum = 0.01
        domain = "sketch" if i % 2 else "photo"
        loss = F.cross_entropy(model(torch.randn(8, 6), domain), torch.randint(0, 3, (8,)))
        yield [stepped(optimizer, loss), model.norms[domain].running_mean]


class _Standardized(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return self._conv_forward(x, w, self.bias)


class _Transformer2d(nn.Module):
    """A spatial transformer before convolutions with standardized weights."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 6))
        nn.init.zeros_(self.place[1].weight)
        self.place[1].bias.data.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))
        self.body = nn.Sequential(_Standardized(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        grid = F.affine_grid(self.place(x).view(-1, 2, 3), list(x.shape), align_corners=False)
        x = F.grid_sample(x, grid, padding_mode="border", align_corners=False)
        return self.head(F.adaptive_avg_pool2d(self.body(x), 1).flatten(1))


@script()
def spatial_transformer(door: Door) -> Iterator[list[Any]]:
    model = door(_Transformer2d())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(STEPS):
        loss = F.cross_entropy(model(torch.randn(4, 3, 8, 8)), torch.randint(0, 3, (4,)))
        yield [stepped(optimizer, loss)]


class _Masked(nn.Module):
    """A masked autoencoder: keeps a random quarter of the patches."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(12, 16), nn.Linear(16, 12)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.missing = nn.Parameter(torch.randn(16) * 0.02)
        self.register_buffer("places", torch.randn(16, 16) * 0.1, persistent=False)

    def forward(self, x: Tensor, ratio: float = 0.75) -> tuple[Tensor, Tensor]:
        b, n, _ = x.shape
        kept = int(n * (1 - ratio))
        order = torch.rand(b, n, device=x.device).argsort(1)
        back = order.argsort(1)
        seen = order[:, :kept, None].expand(-1, -1, 16)
        h = self.encoder((self.enter(x) + self.places).gather(1, seen))
        h = torch.cat([h, self.missing.expand(b, n - kept, -1)], 1)
        h = h.gather(1, back[..., None].expand(-1, -1, 16)) + self.places
        return self.leave(h), (back >= kept).float()


@script()
def masked_autoencoder(door: Door) -> Iterator[list[Any]]:
    model = door(_Masked())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(STEPS):
        x = torch.randn(4, 16, 12)
        found, mask = model(x)
        loss = ((found - x).square().mean(-1) * mask).sum() / mask.sum()
        yield [stepped(optimizer, loss), mask]
