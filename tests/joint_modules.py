"""Modules whose gradients are easily computed wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Flipped(torch.autograd.Function):
    """The identity, with a backward that is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return -2.0 * grad * x.cos()


flipped = Flipped.apply  # bound at import, as users do


class Unchanged(torch.autograd.Function):
    """Returns its argument itself: forward calls no operator, but backward changes the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 3.0 * grad


class Head(nn.Module):
    """A module whose forward is ``function(self, x)``, with some parameters."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.linspace(-1.0, 1.5, 6))
        self.fc = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


class ConvNet(nn.Module):
    """Convolution, batch norm, max pooling and interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, dilation=1)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Conv2d(4, 2, 3, stride=2, groups=2)
        self.up = nn.ConvTranspose2d(2, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2, padding=1)
        h = F.interpolate(h, scale_factor=2, mode="bilinear", align_corners=False)
        return F.interpolate(self.up(self.last(h)), size=(5, 5), mode="nearest")


class Tied(nn.Module):
    """Two layers that share a weight, a frozen layer, and a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unread = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.frozen(self.first(x)))) + x


class Classifier(nn.Module):
    """An embedding with a padding row, and a loss that the module computes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6, padding_idx=0)
        self.out = nn.Linear(6, 5)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> Any:
        logits = self.out(self.embed(tokens).mean(1))
        loss = F.cross_entropy(logits, target, label_smoothing=0.1, ignore_index=2)
        return loss, logits.argmax(-1), logits


class Padded(nn.Module):
    """An embedding with a padding row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6, padding_idx=3)
        self.out = nn.Linear(6, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(tokens))


class Block(nn.Module):
    """A small transformer block with dropout."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=p, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.drop(self.attention(h, h, h, need_weights=False)[0])
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Recurrent(nn.Module):
    """Two recurrent layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 3, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.rnn(x)
