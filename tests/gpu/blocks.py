"""Transformer blocks like those of GPT-2, Llama and ViT."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Block(nn.Module):
    """A pre-norm block of attention and MLP: causal as in GPT-2, or not causal as in ViT."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            _heads(t, self.heads) for t in self.qkv(self.first(x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        approximate = "tanh" if self.causal else "none"
        hidden = functional.gelu(self.up(self.second(x)), approximate=approximate)
        return x + self.down(hidden)


class LlamaBlock(nn.Module):
    """A Llama block: RMSNorm, attention with rotary positions, and SwiGLU."""

    def __init__(self, width: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        names = "query", "key", "value", "out"
        self.parts = nn.ModuleDict({n: nn.Linear(width, width, bias=False) for n in names})
        hidden = 8 * width // 3 // 8 * 8
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        size = width // heads
        rates = 1e4 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(tokens), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.first(x)
        query, key, value = (
            _heads(self.parts[name](normed), self.heads) for name in ("query", "key", "value")
        )
        mixed = functional.scaled_dot_product_attention(
            self._rotated(query), self._rotated(key), value, is_causal=True
        )
        x = x + self.parts["out"](mixed.transpose(1, 2).flatten(2))
        normed = self.second(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-right, left), -1) * self.sin


class Chains(nn.Module):
    """tanh(LayerNorm(x_i)) on 100 slices x_i of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces = (torch.tanh(norm(x[i])) for i, norm in enumerate(self.norms))
        return torch.stack(tuple(pieces))
