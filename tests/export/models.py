"""Models for the tests of export."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(functional.gelu(self.first(x)))


class Attention(nn.Module):
    """Multi-head attention with a causal or a given mask, and a residual."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.inputs, self.outputs, self.norm = (
            nn.Linear(32, 96),
            nn.Linear(32, 32),
            nn.LayerNorm(32),
        )
        self.causal = causal

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.inputs(self.norm(x)).view(batch, length, 3, 4, width // 4).unbind(2)
        query, key, value = (h.transpose(1, 2) for h in heads)
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=self.causal
        )
        return x + self.outputs(out.transpose(1, 2).reshape(batch, length, width))


class Convolutions(nn.Module):
    """A module with each kind of convolution, batch norm and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 7, stride=2, padding=3)
        self.norm = nn.BatchNorm2d(16)
        self.same = nn.Conv2d(16, 32, 3, padding=1)
        self.one = nn.Conv2d(32, 32, 1)
        self.deep = nn.Conv2d(32, 32, 5, padding=4, dilation=2, groups=32)
        self.groups = nn.Conv2d(32, 16, 3, stride=2, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1, groups=2)
        self.line = nn.Conv1d(8, 6, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.stem(x)))
        x = functional.max_pool2d(functional.relu(self.same(x)), 2)
        x = functional.hardswish(self.deep(self.one(x)))
        x = functional.avg_pool2d(self.up(self.groups(x)), 3, 2, 1, count_include_pad=False)
        return self.line(x.flatten(2))


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Structures(nn.Module):
    """A module with many kinds of results: views of arguments and results, constants, lists."""

    def forward(self, x: torch.Tensor, y: dict[str, torch.Tensor], scale: float = 2.0) -> Any:
        total = x + y["other"] * scale
        return {
            "pair": Pair(total, total[:, 1:]),
            "list": [x, x.t(), None, 7],
            "nested": (y["other"].sum(1), "text"),
        }


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.register_buffer("places", torch.arange(20).flip(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)[:, self.places[: tokens.shape[1]] - 20].sum(1)


class Decoder(nn.Module):
    """A decoder from tokens to logits: an embedding, causal multi-head attention, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.block, self.head = (
            nn.Embedding(50, 32),
            Attention(causal=True),
            nn.Linear(32, 50),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.table(tokens)))


class Decompositions(nn.Module):
    """A module with linear algebra, for which there is no generated code without PyTorch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.qr(x).R.sum() + torch.linalg.eigvalsh(x @ x.mT)


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


class Strided(nn.Module):
    """A convolutional network that strides three times, with a dilated depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 7, 2, 3), nn.BatchNorm2d(16)
        self.same = nn.Conv2d(16, 32, 3, padding=1)
        self.depthwise = nn.Conv2d(32, 32, 5, padding=4, dilation=2, groups=32)
        self.groups, self.last = nn.Conv2d(32, 16, 3, 2, 1, groups=4), nn.Linear(16, 7)
        nn.init.normal_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = functional.max_pool2d(self.norm(self.stem(x)).relu(), 3, 2, 1)
        x = self.groups(functional.hardswish(self.depthwise(self.same(x).relu())))
        return self.last(functional.adaptive_avg_pool2d(x, 1).flatten(1)), x


class UNet(nn.Module):
    """A network that halves images, doubles them, and joins both: their sides must be even."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.below = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(16, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        below = self.below(functional.max_pool2d(x, 2)).relu()
        return self.last(torch.cat([x, self.up(below)], 1))
