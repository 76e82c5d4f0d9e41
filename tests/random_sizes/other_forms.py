"""Small modules without attention, whose batches, lengths, nodes, edges and ids vary."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import rnn

_WIDTH = 8


class Rows(nn.Module):
    """A norm, two linear layers and the mean of all losses: the last batch has fewer rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.out(functional.gelu(self.inner(self.norm(x))))
        return functional.cross_entropy(found, labels, ignore_index=-1), found


class Empty(nn.Module):
    """Layers that also take a batch of no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(x).relu()).softmax(-1)


class Contrastive(nn.Module):
    """Similarities of all rows of two batches; row and column of a pair have the same number."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(6, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = (functional.normalize(v, dim=-1) for v in (self.left(x), self.right(y)))
        scores = a @ b.t() / 0.1
        labels = torch.arange(x.shape[0])
        losses = [functional.cross_entropy(each, labels) for each in (scores, scores.t())]
        return sum(losses) / 2, scores


class TextConvolution(nn.Module):
    """A convolution along the length, and the maximum over it, without padded places."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layer = nn.Embedding(30, 8), nn.Conv1d(8, 12, 3, padding=1)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found = self.layer(self.tokens(ids).transpose(1, 2)).relu()
        return found.masked_fill(mask[:, None] == 0, -1e9).amax(-1)


class MeanPooled(nn.Module):
    """The mean of the embeddings of a sentence, by its mask, of length one."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(30, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        weights = mask.unsqueeze(-1).to(self.out.weight.dtype)
        total = (self.tokens(ids) * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return functional.normalize(self.out(total), dim=-1)


class HalvedAndBack(nn.Module):
    """Each second position, transformed, repeated and added to all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        less = self.inner(x[:, ::2]).relu()
        return self.norm(x + less.repeat_interleave(2, 1)[:, : x.shape[1]])


class Shifted(nn.Module):
    """Tokens shifted right, rolled and flipped, with a loss of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(30, 8), nn.Linear(8, 30)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        right = functional.pad(ids[:, :-1], (1, 0), value=2)
        x = self.tokens(right) + self.tokens(ids.roll(1, 1)) * self.tokens(ids.flip(1))
        logits = self.out(x)
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits


class Bags(nn.Module):
    """Bags of embeddings that begin at offsets, with weights of their own in one table."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.EmbeddingBag(30, 8, mode="mean")
        self.sum = nn.EmbeddingBag(30, 8, mode="sum")
        self.out = nn.Linear(16, 3)

    def forward(
        self, ids: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return self.out(torch.cat([self.mean(ids, offsets), self.sum(ids, offsets, weights)], 1))


class RaggedDLRM(nn.Module):
    """A recommender: dense features, and two features with any number of ids each."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(30, 8, mode="sum") for _ in range(2))
        self.bottom, self.top = nn.Linear(6, 8), nn.Linear(11, 1)

    def forward(
        self, dense: torch.Tensor, ids: torch.Tensor, more: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        x = self.bottom(dense).relu()
        both = [t(i, offsets) for t, i in zip(self.tables, (ids, more), strict=True)]
        features = torch.stack([x, *both], 1)
        i, j = torch.triu_indices(3, 3, 1).unbind(0)
        crossed = (features @ features.mT)[:, i, j]
        return self.top(torch.cat([x, crossed], 1)).sigmoid()


class Recurrent(nn.Module):
    """An LSTM or a GRU on padded sequences, and the states of all positions."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell, self.out = kind(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cell(x)[0])


class PackedRecurrent(Recurrent):
    """An LSTM or a GRU on a packed sequence."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        found, _ = self.cell(packed)
        states, _ = rnn.pad_packed_sequence(found, batch_first=True)
        return self.out(states)


class Lists(nn.Module):
    """A list of sequences with a length each, and a dictionary of further features."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, given: list[torch.Tensor], more: dict[str, torch.Tensor]) -> torch.Tensor:
        means = torch.stack([self.inner(x).relu().mean(0) for x in given])
        return self.out(means + more["bias"].mean(0))


class PaddedLists(Lists):
    """A list of sequences, padded to the longest of them inside of forward."""

    def forward(self, given: list[torch.Tensor], more: dict[str, torch.Tensor]) -> torch.Tensor:
        padded = rnn.pad_sequence(given, batch_first=True)
        return self.out(self.inner(padded).relu() + more["bias"].mean(0))


class GCN(nn.Module):
    """A graph convolution with self-loops and symmetric normalization by degrees."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        loops = torch.arange(x.shape[0])
        source, target = (torch.cat([each, loops]) for each in edges.unbind(0))
        degree = x.new_zeros(x.shape[0]).scatter_add(0, target, x.new_ones(target.shape[0]))
        norm = degree.rsqrt()[source] * degree.rsqrt()[target]
        for layer in (self.first, self.second):
            moved = layer(x)[source] * norm.unsqueeze(-1)
            x = x.new_zeros(x.shape[0], moved.shape[1]).index_add(0, target, moved).relu()
        return x


class GAT(nn.Module):
    """Attention over the edges of each node: a softmax by groups."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.score = nn.Linear(8, 8), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges[0], edges[1]
        h = self.inner(x)
        scores = functional.leaky_relu(self.score(torch.cat([h[source], h[target]], 1)))[:, 0]
        most = scores.new_full((x.shape[0],), -1e9).scatter_reduce(0, target, scores, "amax")
        weights = (scores - most.detach()[target]).exp()
        total = weights.new_zeros(x.shape[0]).index_add(0, target, weights)
        weights = weights / (total[target] + 1e-9)
        return h + torch.zeros_like(h).index_add(0, target, h[source] * weights[:, None])


class GraphPooled(nn.Module):
    """The mean of the nodes of each graph in a batch of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, owner: torch.Tensor, graphs: torch.Tensor) -> torch.Tensor:
        h = self.inner(x).relu()
        total = h.new_zeros(graphs.shape[0], 8).index_add(0, owner, h)
        count = h.new_zeros(graphs.shape[0]).index_add(0, owner, h.new_ones(x.shape[0]))
        return self.out(total / count.clamp(min=1)[:, None]) + graphs[:, None]


class TwoTowers(nn.Module):
    """Scores of all candidates for each user, with a softmax over the candidates."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(30, 8), nn.Embedding(40, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        scores = self.norm(self.users(users)) @ self.items(items).t()
        best = scores.argmax(-1)
        return scores.log_softmax(-1) + functional.one_hot(best, 40).to(scores.dtype).sum()


class Decay(nn.Module):
    """Cumulative sums and products along the length, divided by the count of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.inner(x).sigmoid()
        counts = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return (x * gates).cumsum(1) / counts + gates.flip(1).cumprod(1).flip(1)
