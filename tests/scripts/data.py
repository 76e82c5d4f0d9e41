"""Scripts whose sizes or decisions depend on data, and inputs that are no plain dense batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.scripts.script import Door, script

STEPS = 12


def trained(model: Any, calls: Any, lr: float = 0.05) -> Iterator[list[Any]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for i in range(STEPS):
        out = calls(model, i)
        leaves = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]
        loss = sum(
            (t.abs() if t.is_complex() else t).square().mean() for t in leaves if t.requires_grad
        )
        optimizer.zero_grad()
        if isinstance(loss, Tensor):
            loss.backward()
        optimizer.step()
        yield [loss, *leaves]


class _Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6, padding_idx=0)
        self.lstm = nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(16, 3)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.table(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        out, (h, _) = self.lstm(packed)
        padded, _ = pad_packed_sequence(out, batch_first=True)
        return self.head(torch.cat([h[-2], h[-1]], -1) + padded.mean(1))


# Refused: the lengths decide the shape of a packed sequence.
@script(least=0.0)
def packed_lstm(door: Door) -> Iterator[list[Any]]:
    def call(m: Any, i: int) -> Any:
        lengths = torch.randint(2, 8, (5,))
        ids = torch.randint(1, 20, (5, int(lengths.max())))
        return m(ids, lengths)

    yield from trained(door(_Packed()), call)


class _Unique(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(30, 8), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        values, inverse = torch.unique(ids, return_inverse=True)
        return self.head(self.table(values).tanh())[inverse]


@script()
def unique(door: Door) -> Iterator[list[Any]]:
    yield from trained(door(_Unique()), lambda m, i: m(torch.randint(0, 30, (4, 6))))


class _UniqueMean(nn.Module):
    """Means of groups whose number depends on data, as in superpixels or scatter_mean."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, group: Tensor) -> Tensor:
        ids, inverse, counts = group.unique(return_inverse=True, return_counts=True)
        h = self.body(x).relu()
        sums = h.new_zeros(len(ids), h.shape[1]).index_add_(0, inverse, h)
        return self.head(sums / counts.unsqueeze(1))


@script()
def unique_groups(door: Door) -> Iterator[list[Any]]:
    yield from trained(
        door(_UniqueMean()), lambda m, i: m(torch.randn(12, 5), torch.randint(0, 9, (12,)))
    )


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).relu()
        chosen = self.head(h[mask])
        return chosen.log_softmax(-1), torch.masked_select(h, mask.unsqueeze(-1)).mean()


@script()
def masked_rows(door: Door) -> Iterator[list[Any]]:
    yield from trained(
        door(_Masked()), lambda m, i: m(torch.randn(4, 7, 6), torch.rand(4, 7) > 0.4)
    )


@script()
def masked_rows_edge(door: Door) -> Iterator[list[Any]]:
    """Masks that choose no row, one row, or all."""

    def call(m: Any, i: int) -> Any:
        mask = torch.zeros(4, 7, dtype=torch.bool)
        mask.view(-1)[: (28, 1, 12, 2)[i % 4]] = True
        return m(torch.randn(4, 7, 6), mask)

    yield from trained(door(_Masked()), call)


class _Nonzero(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score, self.refine, self.head = nn.Linear(6, 1), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        score = self.score(x).squeeze(-1).sigmoid()
        keep = (score > 0.5).nonzero().squeeze(-1)
        refined = self.refine(x[keep]).relu()
        out = x.clone()
        out[keep] = refined * score[keep, None]
        return self.head(out)


@script()
def nonzero_rows(door: Door) -> Iterator[list[Any]]:
    yield from trained(door(_Nonzero()), lambda m, i: m(torch.randn(12, 6)))


class _Experts(nn.Module):
    """Top-k routing with a loop over experts, in the style of Mixtral."""

    def __init__(self, skip: bool) -> None:
        super().__init__()
        self.gate, self.skip = nn.Linear(8, 4, bias=False), skip
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(x)
        weights, chosen = torch.topk(logits.softmax(-1, dtype=torch.float), 2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        mask = F.one_hot(chosen, 4).permute(2, 1, 0)
        for e, expert in enumerate(self.experts):
            slot, token = torch.where(mask[e])
            if self.skip and token.numel() == 0:
                continue
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out, logits


@script()
def experts(door: Door) -> Iterator[list[Any]]:
    yield from trained(door(_Experts(False)), lambda m, i: m(torch.randn(12, 8)))


# Python ends a pass of the loop by data.
@script(least=0.0)
def experts_skipped(door: Door) -> Iterator[list[Any]]:
    yield from trained(door(_Experts(True)), lambda m, i: m(torch.randn(12, 8)))


class _DenseExperts(_Experts):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(x)
        top, chosen = logits.topk(2, -1)
        gates = torch.zeros_like(logits).scatter(-1, chosen, top.softmax(-1))
        out = torch.stack([expert(x) for expert in self.experts], 1)
        return torch.einsum("ne,ned->nd", gates, out), logits


@script()
def experts_dense(door: Door) -> Iterator[list[Any]]:
    yield from trained(door(_DenseExperts(False)), lambda m, i: m(torch.randn(12, 8)))


class _EarlyExit(nn.Module):
    """A forward that stops when it is sure, by item()."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            logits = head(x)
            if logits.softmax(-1).max().item() > 0.6:
                break
        return logits


# Python ends the loop by data.
@script(least=0.0)
def early_exit(door: Door) -> Iterator[list[Any]]:
    model = door(_EarlyExit().eval())
    with torch.no_grad():
        for _ in range(20):
            yield [model(torch.randn(1, 6) * 2)]


class _Nms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.boxes, self.scores = nn.Linear(6, 16), nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        from torchvision.ops import batched_nms, nms

        h = self.body(x).relu()
        start, size = self.boxes(h).sigmoid().chunk(2, -1)
        boxes, scores = torch.cat([start, start + size], -1), self.scores(h).squeeze(-1)
        keep = nms(boxes, scores, 0.5)[:5]
        also = batched_nms(boxes, scores, (scores > 0).long(), 0.5)[:4]
        return boxes[keep] * 2 + 1, scores[also].sigmoid()


@script("torchvision")
def suppression(door: Door) -> Iterator[list[Any]]:
    model = door(_Nms().eval())
    with torch.no_grad():
        for _ in range(STEPS):
            yield list(model(torch.randn(20, 6)))


class _Beam(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell, self.out = nn.Embedding(12, 8), nn.GRUCell(8, 8), nn.Linear(8, 12)

    def forward(self, token: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.cell(self.table(token), hidden)
        return self.out(hidden).log_softmax(-1), hidden


@script()
def beam_search(door: Door) -> Iterator[list[Any]]:
    model = door(_Beam().eval())
    with torch.no_grad():
        for _ in range(3):
            token, hidden, scores = torch.ones(1).long(), torch.randn(1, 8), torch.zeros(1)
            sequences = token[:, None]
            for _ in range(8):
                logs, hidden = model(token, hidden)
                total = (scores[:, None] + logs).view(-1)
                scores, flat = total.topk(3)
                beam, token = flat // 12, flat % 12
                hidden = hidden[beam]
                sequences = torch.cat([sequences[beam], token[:, None]], 1)
                yield [scores, sequences]


class _Decoder(nn.Module):
    """A forward that samples in a loop, with teacher forcing decided by Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _Beam()

    def forward(self, hidden: Tensor, steps: int, temperature: float = 1.0) -> Tensor:
        token = torch.ones(hidden.shape[0], dtype=torch.long)
        tokens = []
        for _ in range(steps):
            logs, hidden = self.inner(token, hidden)
            token = torch.multinomial((logs / temperature).softmax(-1), 1).squeeze(1)
            tokens.append(token)
        return torch.stack(tokens, 1)


@script()
def sampling_loop(door: Door) -> Iterator[list[Any]]:
    model = door(_Decoder().eval())
    with torch.no_grad():
        for i in range(STEPS):
            yield [model(torch.randn(4, 8), 5, temperature=1.0 - 0.05 * i)]


class _Crf(nn.Module):
    """The forward algorithm of a linear-chain CRF with a mask, and Viterbi."""

    def __init__(self) -> None:
        super().__init__()
        self.emit, self.move = nn.Linear(6, 4), nn.Parameter(torch.randn(4, 4) * 0.1)

    def forward(self, x: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        e = self.emit(x)
        alpha = e[:, 0]
        score = e[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, x.shape[1]):
            step = torch.logsumexp(alpha.unsqueeze(2) + self.move, 1) + e[:, t]
            alpha = torch.where(mask[:, t, None], step, alpha)
            gain = e[:, t].gather(1, tags[:, t : t + 1]).squeeze(1)
            score = score + (gain + self.move[tags[:, t - 1], tags[:, t]]) * mask[:, t]
        return (torch.logsumexp(alpha, 1) - score).mean()


@script()
def crf(door: Door) -> Iterator[list[Any]]:
    def call(m: Any, i: int) -> Any:
        mask = torch.arange(6)[None] < torch.randint(2, 7, (5, 1))
        return m(torch.randn(5, 6, 6), torch.randint(0, 4, (5, 6)), mask)

    yield from trained(door(_Crf()), call)


class _Pooling(nn.Module):
    """Sentence embeddings: mean, CLS and max pooling over a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        mask = features["attention_mask"]
        h = self.encoder(self.table(features["input_ids"]), src_key_padding_mask=mask == 0)
        wide = mask.unsqueeze(-1).expand(h.size()).float()
        mean = (h * wide).sum(1) / wide.sum(1).clamp(min=1e-9)
        h[wide == 0] = -1e9
        features.update({"mean": F.normalize(mean, dim=1), "max": h.max(1)[0], "cls": h[:, 0]})
        return features


@script()
def sentence_pooling(door: Door) -> Iterator[list[Any]]:
    def call(m: Any, i: int) -> Any:
        length = (8, 5, 8, 11, 9, 7)[i % 6]
        ids = torch.randint(1, 40, (4, length))
        mask = (torch.arange(length)[None] < torch.randint(2, length + 1, (4, 1))).long()
        out = m({"input_ids": ids, "attention_mask": mask})
        return [out["mean"], out["max"], out["cls"]]

    yield from trained(door(_Pooling()), call)
