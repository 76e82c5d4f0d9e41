"""Scripts of serving and of data: dicts of padded texts, sizes that grow, windows, speech."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from tests.scripts.script import Door, script
from tests.scripts.training import stepped


class _Texts(Dataset[dict[str, Any]]):
    def __init__(self, count: int) -> None:
        g = torch.Generator().manual_seed(0)
        sizes = torch.randint(3, 12, (count,), generator=g).tolist()
        self.ids = [torch.randint(1, 30, (n,), generator=g) for n in sizes]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.ids[index]
        return {"ids": ids, "label": int(ids.sum()) % 3, "name": f"text {index}"}


def _collated(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ids = pad_sequence([row["ids"] for row in rows], batch_first=True)
    labels = torch.tensor([row["label"] for row in rows])
    names = [row["name"] for row in rows]
    return {"inputs": {"ids": ids, "mask": ids == 0}, "label": labels, "name": names}


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 16, padding_idx=0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 3)

    def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        ids, mask = batch["inputs"]["ids"], batch["inputs"]["mask"]
        h = self.encoder(self.words(ids), src_key_padding_mask=mask)
        kept = (~mask).unsqueeze(-1)
        pooled = (h * kept).sum(1) / kept.sum(1).clamp_min(1)
        logits = self.head(pooled)
        return {"loss": F.cross_entropy(logits, batch["label"]), "logits": logits}


@script()
def padded_texts(door: Door) -> Iterator[list[Any]]:
    """A whole batch of a DataLoader, with names, is the argument; the last batch is smaller."""
    model = door(_Encoder())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    g = torch.Generator().manual_seed(1)
    data = DataLoader(_Texts(46), 8, shuffle=True, collate_fn=_collated, generator=g)
    for _ in range(4):
        for batch in data:
            loss = model.train()(batch)["loss"]
            yield [stepped(optimizer, loss)]
        with torch.no_grad():
            for batch in data:
                yield [model.eval()(batch)]


@script()
def progressive_sizes(door: Door) -> Iterator[list[Any]]:
    """Images grow from epoch to epoch; flips are averaged at the end."""
    body = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1)]
    model = door(nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, nesterov=True)
    for side in (16, 20, 24, 32):
        for _ in range(10):
            x = torch.randn(4, 3, side, side)
            loss = F.cross_entropy(model(x), torch.randint(0, 3, (4,)))
            yield [stepped(optimizer, loss)]
    model.eval()
    for _ in range(4):
        with torch.inference_mode():
            x = torch.randn(2, 3, 32, 32)
            yield [model(x).softmax(-1) + model(x.flip(-1)).softmax(-1)]


class _Windows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 1, 1))

    @torch.no_grad()
    def forward(self, x: Tensor, size: int = 8, stride: int = 4) -> Tensor:
        tiles = F.unfold(x, size, stride=stride)
        b, _, n = tiles.shape
        tiles = tiles.transpose(1, 2).reshape(b * n, 1, size, size)
        found = self.body(tiles).reshape(b, n, size * size).transpose(1, 2)
        one = F.fold(torch.ones_like(found), x.shape[-2:], size, stride=stride)
        return F.fold(found, x.shape[-2:], size, stride=stride) / one


@script()
def sliding_windows(door: Door) -> Iterator[list[Any]]:
    """A no_grad forward cuts images into windows; the caller writes into the results."""
    model = door(_Windows())
    for i in range(16):
        x = torch.randn(1, 1, 16 + 4 * (i % 2), 24)
        found = model(x)
        yield [found]
        found.mul_(2).clamp_(min=0)
        yield [found]


class _Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 16, 3, 2, 1)
        self.rnn = nn.GRU(16, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 6)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        h = self.conv(x).relu().transpose(1, 2)
        lengths = (lengths + 1) // 2
        inside = torch.arange(h.shape[1]) < lengths[:, None]
        h, _ = self.rnn(h * inside[..., None])
        return self.head(h).log_softmax(-1), lengths


@script()
def speech_ctc(door: Door) -> Iterator[list[Any]]:
    model = door(_Speech())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    loss_of = nn.CTCLoss(zero_infinity=True)
    for _ in range(16):
        lengths = torch.randint(16, 33, (4,))
        x = torch.randn(4, 8, int(lengths.max()))
        found, steps = model(x, lengths)
        wanted = torch.randint(1, 6, (4, 4))
        loss = loss_of(found.transpose(0, 1), wanted, steps, torch.full((4,), 4))
        yield [stepped(optimizer, loss)]


class _Adapted(nn.Module):
    """A layer with a low-rank addition that is merged into the weight in eval mode."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.base = nn.Linear(a, b).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, a) * 0.1), nn.Parameter(torch.zeros(b, 2))
        self.merged = False

    def train(self, mode: bool = True) -> _Adapted:
        super().train(mode)
        if mode == self.merged:
            sign = -1 if mode else 1
            self.base.weight.data += sign * (self.up @ self.down).data
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return self.base(x)
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


@script()
def merged_adapters(door: Door) -> Iterator[list[Any]]:
    model = door(nn.Sequential(_Adapted(6, 16), nn.Tanh(), _Adapted(16, 3)))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    for i in range(6):
        for _ in range(6):
            loss = F.cross_entropy(model(torch.randn(8, 6)), torch.randint(0, 3, (8,)))
            yield [stepped(optimizer, loss)]
        model.eval()
        with torch.inference_mode():
            for _ in range(4):
                yield [model(torch.randn(8, 6))]
        model.train()
        if i == 2:
            yield list(model.state_dict().values())


@script()
def skip_grams(door: Door) -> Iterator[list[Any]]:
    """Negative sampling with bags of words of changing lengths, weighted word by word."""
    model = door(_Bags())
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
    for _ in range(20):
        count = int(torch.randint(12, 30, ()))
        words, weights = torch.randint(0, 50, (count,)), torch.rand(count)
        offsets = torch.tensor([0, 3, 7, 11])
        loss = model(words, offsets, weights, torch.randint(0, 50, (4, 6)))
        yield [stepped(optimizer, loss)]


class _Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.given = nn.EmbeddingBag(50, 8, mode="sum")
        self.asked = nn.Embedding(50, 8)

    def forward(self, words: Tensor, offsets: Tensor, weights: Tensor, others: Tensor) -> Tensor:
        bags = self.given(words, offsets, per_sample_weights=weights)
        scores = torch.einsum("bd,bkd->bk", bags, self.asked(others))
        return F.binary_cross_entropy_with_logits(
            scores, (torch.arange(6) == 0).float().expand(4, 6)
        )
