"""Small modules with attention, whose batches and lengths vary as in language models."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

_WIDTH, _HEADS = 8, 2


class Attention(nn.Module):
    """Projections of queries, keys and values, and attention with an additive or boolean mask."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(_WIDTH, _WIDTH) for _ in range(3))
        self.out = nn.Linear(_WIDTH, _WIDTH)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` as (batch, heads, length, width of a head)."""
        return x.view(x.shape[0], x.shape[1], _HEADS, -1).transpose(1, 2)

    def attend(
        self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return what the positions of ``x`` read from the positions of ``y``."""
        q, k, v = self.heads(self.q(x)), self.heads(self.k(y)), self.heads(self.v(y))
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(found.transpose(1, 2).reshape(x.shape[0], x.shape[1], _WIDTH))


class Masked(Attention):
    """Self-attention with a padding mask, or without one."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is None:
            return self.attend(x, x)
        return self.attend(x, x, mask[:, None, None, :].bool())


class LeftPadded(Attention):
    """Causal self-attention with left padding; positions are counted from the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(128, _WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        places = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
        n = x.shape[1]
        causal = torch.full((n, n), -1e9, dtype=x.dtype).triu(1)
        added = causal + (1 - mask[:, None, None, :].to(x.dtype)) * -1e9
        return self.attend(x + self.places(places), x, added)


class Cross(Attention):
    """Attention to a memory of another length."""

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return self.attend(x, memory) + x


class Cached(Attention):
    """Attention to earlier keys and values and to new ones; returns the longer cache."""

    def forward(
        self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        keys = torch.cat([keys, self.heads(self.k(x))], 2)
        values = torch.cat([values, self.heads(self.v(x))], 2)
        total, new = keys.shape[2], x.shape[1]
        mask = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        q = self.heads(self.q(x))
        found = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.out(found.transpose(1, 2).reshape(x.shape)), keys, values


class StaticCache(Attention):
    """A cache of a fixed length, which each call writes at positions that it is given."""

    def forward(
        self, x: torch.Tensor, cache: torch.Tensor, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cache = cache.index_copy(1, places, self.k(x))
        seen = torch.arange(cache.shape[1])[None, :] <= places[:, None]
        return self.attend(x, cache, seen), cache


class Sliding(Attention):
    """Causal attention to the four latest positions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        apart = places[:, None] - places[None, :]
        return self.attend(x, x, (apart >= 0) & (apart < 4))


class Alibi(Attention):
    """Biases that grow with the distance of positions, by heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        slopes = torch.tensor([0.5, 0.25], dtype=x.dtype)
        bias = -(places[None, :] - places[:, None]).abs().to(x.dtype) * slopes[:, None, None]
        return self.attend(x, x, bias)


class Relative(Attention):
    """T5's biases: an embedding of the distance's bucket, logarithmic for far positions."""

    def __init__(self) -> None:
        super().__init__()
        self.biases = nn.Embedding(8, _HEADS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        apart = places[None, :] - places[:, None]
        bucket, far = (apart > 0).long() * 4, apart.abs()
        large = 2 + (torch.log(far.float() / 2 + 1e-6) / math.log(8) * 2).long()
        bucket = bucket + torch.where(far < 2, far, large.clamp(max=3))
        return self.attend(x, x, self.biases(bucket).permute(2, 0, 1)[None])


class Rotary(Attention):
    """Queries and keys rotated by angles from a table, which is sliced by the length."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(128.0), torch.tensor([1.0, 0.1]))
        self.register_buffer("table", torch.cat([angles, angles], 1), persistent=False)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` rotated by the angles of its positions."""
        angles = self.table[: x.shape[2]]
        left, right = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-right, left], -1) * angles.sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.heads(each(x)) for each in (self.q, self.k, self.v))
        found = functional.scaled_dot_product_attention(
            self.turned(q), self.turned(k), v, is_causal=True
        )
        return self.out(found.transpose(1, 2).reshape(x.shape))


class Chunked(Attention):
    """Attention within chunks of four positions; the length is padded to a multiple of four."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, w = x.shape
        padded = functional.pad(x, (0, 0, 0, -n % 4))
        chunks = padded.reshape(-1, 4, w)
        return self.attend(chunks, chunks).reshape(b, -1, w)[:, :n]


class Packed(Attention):
    """Sequences one behind the other, with the places where each begins (``cu_seqlens``)."""

    def forward(self, x: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        owner = torch.searchsorted(begins, torch.arange(x.shape[0]), right=True)
        return self.attend(x[None], x[None], owner[:, None] == owner[None, :])[0]


class RelativeShift(Attention):
    """Transformer-XL's shift of scores by padding and another view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = (self.heads(each(x)) for each in (self.q, self.k, self.v))
        scores = functional.pad(q @ k.transpose(-1, -2), (1, 0))
        scores = scores.view(b, _HEADS, n + 1, n)[:, :, 1:]
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))


class Linear(Attention):
    """Linear attention: cumulative sums of products of keys and values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x).sigmoid(), self.k(x).sigmoid(), self.v(x)
        sums = torch.einsum("bni,bnj->bnij", k, v).cumsum(1)
        norm = (q * k.cumsum(1)).sum(-1, keepdim=True)
        return self.out(torch.einsum("bni,bnij->bnj", q, sums) / (norm + 1e-3))


class WithClass(Attention):
    """A learned token in front, positions, pooling at the token."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, _WIDTH))
        self.places = nn.Parameter(torch.randn(1, 128, _WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        x = x + self.places[:, : x.shape[1]]
        return self.attend(x, x)[:, 0]
