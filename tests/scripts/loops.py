"""Scripts as tutorials write them: a model, its loss, its loop and its validation."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.scripts.changes import sgd
from tests.scripts.script import Door, script
from tests.scripts.training import STEPS, mlp, stepped


@script()
def amp_accumulated_average(door: Door) -> Iterator[list[Any]]:
    """Mixed precision on the CPU, two batches a step, clipping, and an average of the weights."""
    model = door(nn.Sequential(nn.Linear(10, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for i in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(torch.randn(8, 10))
            loss = F.cross_entropy(logits, torch.randint(0, 4, (8,))) / 2
        scaler.scale(loss).backward()
        if i % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            average.update_parameters(model)
        yield [loss]
    with torch.no_grad():
        yield [average.eval()(torch.randn(8, 10))]


@script()
def stops_early(door: Door) -> Iterator[list[Any]]:
    """Epochs with a smaller last batch, a validation, a plateau, and the best weights restored."""
    model = door(nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 1)))
    data, targets = torch.randn(44, 6), torch.randn(44, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    best, kept, patience = math.inf, copy.deepcopy(model.state_dict()), 0
    for _ in range(8):
        model.train()
        for rows in torch.randperm(44).split(16):
            yield [stepped(optimizer, F.mse_loss(model(data[rows]), targets[rows]))]
        model.eval()
        with torch.no_grad():
            loss = F.mse_loss(model(data[:10]), targets[:10]).item()
        schedule.step(loss)
        yield [loss]
        if loss < best:
            best, kept, patience = loss, copy.deepcopy(model.state_dict()), 0
        else:
            patience += 1
        if patience == 5:
            break
    model.load_state_dict(kept)
    with torch.no_grad():
        yield [model(data[:10])]


class _Tasks(nn.Module):
    """Heads by name, whose losses are weighted by what the model learns of their noise."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(8, 24, 16)
        self.heads = nn.ModuleDict({"kind": nn.Linear(16, 3), "age": nn.Linear(16, 1)})
        self.noise = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in self.heads})

    def forward(self, x: Tensor, targets: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        hidden = self.body(x)
        out = {name: head(hidden) for name, head in self.heads.items()}
        if targets is not None:
            losses = {
                "kind": F.cross_entropy(out["kind"], targets["kind"]),
                "age": F.smooth_l1_loss(out["age"].squeeze(-1), targets["age"]),
            }
            weighted = [(-self.noise[n]).exp() * loss + self.noise[n] for n, loss in losses.items()]
            out["loss"] = torch.stack(weighted).sum()
        return out


@script()
def several_tasks(door: Door) -> Iterator[list[Any]]:
    model = door(_Tasks())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for i in range(STEPS):
        targets = {"kind": torch.randint(0, 3, (7,)), "age": torch.rand(7)}
        out = model(torch.randn(7, 8), targets)
        yield [stepped(optimizer, out["loss"])]
        if i % 3 == 2:
            with torch.no_grad():
                yield list(model(torch.randn(7, 8)).values())


class _Pairs(nn.Module):
    """Contrastive learning: the other view of a row is positive, and all other rows negative."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head, self.temperature = mlp(12, 24, 16), mlp(16, 16, 8), 0.2

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        z = F.normalize(self.head(self.encoder(torch.cat([one, other]))), dim=1)
        n = one.size(0)
        similar = z @ z.T / self.temperature
        similar = similar.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
        labels = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
        return F.cross_entropy(similar, labels)


@script()
def pairs_of_views(door: Door) -> Iterator[list[Any]]:
    model = door(_Pairs())
    optimizer = sgd(model)
    for i in range(STEPS):
        x = torch.randn(6 if i % 4 else 5, 12)
        views = x + 0.1 * torch.randn_like(x), x * (torch.rand_like(x) > 0.2)
        yield [stepped(optimizer, model(*views))]


@script()
def q_learning(door: Door) -> Iterator[list[Any]]:
    """A step with one state, then a batch from a replay buffer and a copy of the network."""
    model = door(mlp(4, 24, 2))
    target = door(mlp(4, 24, 2))
    target.load_state_dict(model.state_dict())
    target.requires_grad_(False)
    optimizer, state, memory = torch.optim.RMSprop(model.parameters(), lr=1e-3), torch.randn(4), []
    generator = torch.Generator().manual_seed(0)
    for i in range(16):
        with torch.no_grad():
            values = model(state.unsqueeze(0))
        action = values.argmax(1).item() if i % 3 else i % 2
        after = torch.randn(4, generator=generator)
        memory.append((state, action, float(i % 5), after))
        state = after
        yield [values]
        if i < 3:
            continue
        rows = torch.randint(0, len(memory), (8,), generator=generator).tolist()
        s, a, r, t = zip(*(memory[row] for row in rows), strict=True)
        with torch.no_grad():
            best = target(torch.stack(t)).max(1).values
        chosen = model(torch.stack(s)).gather(1, torch.tensor(a).unsqueeze(1)).squeeze(1)
        yield [stepped(optimizer, F.huber_loss(chosen, torch.tensor(r) + 0.9 * best))]
        if i % 4 == 0:
            target.load_state_dict(model.state_dict())


class _Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.beta = mlp(12, 24, 8), mlp(4, 24, 12), 0.0

    def reparameterize(self, mean: Tensor, log_variance: Tensor) -> Tensor:
        if not self.training:
            return mean
        return mean + torch.randn_like(mean) * (0.5 * log_variance).exp()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        out = self.decoder(self.reparameterize(mean, log_variance))
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1).mean()
        return out, divergence, F.mse_loss(out, x) + self.beta * divergence


@script()
def vae_with_growing_beta(door: Door) -> Iterator[list[Any]]:
    model = door(_Vae())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for i in range(STEPS):
        model.beta = min(1.0, i / 8)
        out, divergence, loss = model(torch.rand(6, 12))
        yield [stepped(optimizer, loss), divergence, out]
        if i % 4 == 3:
            with torch.no_grad():
                yield list(model.eval()(torch.rand(6, 12)))
            model.train()


# TorchDynamo captures nothing of nn.Sequential itself; the calls are those of a hook.
@script(compiled=0.0)
def distilled(door: Door) -> Iterator[list[Any]]:
    """A teacher without gradients, softened logits, and features that hooks keep."""
    teacher, student = door(mlp(10, 48, 48, 4).eval()), door(mlp(10, 12, 4))
    features: dict[str, Tensor] = {}
    teacher[2].register_forward_hook(lambda m, a, out: features.update(teacher=out.detach()))
    project = nn.Linear(12, 48)
    student[0].register_forward_hook(lambda m, a, out: features.update(student=out))
    optimizer = torch.optim.SGD([*student.parameters(), *project.parameters()], lr=0.05)
    for _ in range(STEPS):
        x, y = torch.randn(8, 10), torch.randint(0, 4, (8,))
        with torch.no_grad():
            soft = F.softmax(teacher(x) / 3.0, dim=1)
        logits = student(x)
        loss = F.cross_entropy(logits, y) + 9 * F.kl_div(
            F.log_softmax(logits / 3.0, dim=1), soft, reduction="batchmean"
        )
        loss = loss + F.mse_loss(project(features["student"]), features["teacher"])
        yield [stepped(student, optimizer, loss)]


class _TextCnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 12, padding_idx=0)
        self.convolutions = nn.ModuleList(nn.Conv1d(12, 10, k, padding=k - 1) for k in (2, 3, 4))
        self.dropout, self.out = nn.Dropout(0.3), nn.Linear(30, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).transpose(1, 2)
        pooled = [F.relu(each(x)).max(dim=2).values for each in self.convolutions]
        return self.out(self.dropout(torch.cat(pooled, dim=1)))


@script()
def text_cnn(door: Door) -> Iterator[list[Any]]:
    model = door(_TextCnn())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for i in range(16):
        rows = [torch.randint(1, 50, (5 + (3 * i + 2 * j) % 9,)) for j in range(6)]
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        loss = F.cross_entropy(model(tokens), torch.randint(0, 2, (6,)))
        yield [stepped(optimizer, loss)]


class _Forecast(nn.Module):
    """An LSTM that reads a series, and then predicts steps from its own predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(2, 12, num_layers=2, batch_first=True, dropout=0.1)
        self.cell, self.out = nn.LSTMCell(2, 12), nn.Linear(12, 2)

    def forward(self, x: Tensor, steps: int, target: Tensor | None = None) -> Tensor:
        _, (h, c) = self.encoder(x)
        h, c, last = h[-1], c[-1], x[:, -1]
        outputs = []
        for i in range(steps):
            h, c = self.cell(last, (h, c))
            last = self.out(h)
            outputs.append(last)
            if target is not None:
                last = target[:, i]
        return torch.stack(outputs, dim=1)


@script()
def forecast(door: Door) -> Iterator[list[Any]]:
    model = door(_Forecast())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for i in range(STEPS):
        series = torch.randn(5, 14, 2).cumsum(1) / 4
        x, y = series[:, :10], series[:, 10:]
        yield [stepped(optimizer, F.l1_loss(model(x, 4, y), y))]
        if i % 3 == 2:
            model.eval()
            with torch.no_grad():
                yield [model(x, 4)]
            model.train()


class _Head(nn.Module):
    """The angular margin of face recognition, on the logit of a row's own class."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.margin, self.scale = mlp(10, 24, 8), 0.3, 16.0
        self.weight = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        cosine = F.linear(F.normalize(self.body(x)), F.normalize(self.weight))
        if labels is None:
            return cosine * self.scale
        sine = (1.0 - cosine.pow(2)).clamp(min=1e-6).sqrt()
        margin = cosine * math.cos(self.margin) - sine * math.sin(self.margin)
        own = torch.zeros_like(cosine).scatter_(1, labels.view(-1, 1), 1.0)
        return (own * margin + (1.0 - own) * cosine) * self.scale


@script()
def angular_margin(door: Door) -> Iterator[list[Any]]:
    model = door(_Head())
    optimizer = sgd(model)
    for i in range(STEPS):
        y = torch.randint(0, 5, (8,))
        yield [stepped(optimizer, F.cross_entropy(model(torch.randn(8, 10), y), y))]
        if i % 3 == 2:
            with torch.no_grad():
                yield [model(torch.randn(8, 10)).argmax(1)]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.proj, self.mlp = nn.Linear(16, 48), nn.Linear(16, 16), mlp(16, 32, 16)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.qkv(self.first(x)).split(c, dim=2)
        q, k, v = (each.view(b, t, 2, c // 2).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp(self.second(x))


class _Gpt(nn.Module):
    """A small language model of characters, as tutorials write it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, 16), nn.Embedding(12, 16)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 20, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(idx) + self.places(torch.arange(idx.size(1), device=idx.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.view(-1, 20), targets.view(-1), ignore_index=-1)


@script()
def small_gpt(door: Door) -> Iterator[list[Any]]:
    model = door(_Gpt())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    for _ in range(8):
        text = torch.randint(0, 20, (4, 13))
        yield [stepped(optimizer, model(text[:, :-1], text[:, 1:].contiguous())[1])]
    model.eval()
    idx = torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():
        for _ in range(24):
            logits, _ = model(idx if idx.size(1) <= 12 else idx[:, -12:])
            chosen = torch.topk(logits[:, -1, :] / 0.8, 5).indices[:, :1]
            idx = torch.cat([idx, chosen], dim=1)
            yield [logits]


class _UNet(nn.Module):
    """Skips whose sizes are made equal by padding, as images of odd sizes need it."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)])
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.last = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.down[0](x))
        y = self.up(F.relu(self.down[1](F.max_pool2d(skip, 2))))
        tall, wide = skip.size(2) - y.size(2), skip.size(3) - y.size(3)
        y = F.pad(y, [wide // 2, wide - wide // 2, tall // 2, tall - tall // 2])
        return self.last(torch.cat([skip, y], dim=1))


@script()
def unet_of_odd_sizes(door: Door) -> Iterator[list[Any]]:
    model = door(_UNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for i in range(16):
        size = (13, 17) if i % 2 else (13, 16)
        x, y = torch.randn(2, 1, *size), torch.rand(2, 1, *size).round()
        p = model(x).sigmoid()
        dice = 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)
        yield [stepped(optimizer, dice + F.binary_cross_entropy(p, y))]
