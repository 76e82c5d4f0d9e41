"""Small configurations with random weights of the models whose Relay is run and compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from tests.models import bert_model

Made = tuple[nn.Module, Any]


def with_statistics(module: nn.Module) -> nn.Module:
    """Give batch norms statistics and weights that are no constants, and return the module."""
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.8, 1.2)
            nn.init.normal_(layer.bias, std=0.1)
            assert layer.running_mean is not None
            assert layer.running_var is not None
            layer.running_mean.normal_(std=0.1)
            layer.running_var.uniform_(0.2, 0.6)
    return module.eval()


def bert() -> Made:
    sizes = {"vocab_size": 100, "max_position_embeddings": 32}
    model = bert_model(width=64, heads=4, layers=2, **sizes).eval()
    mask = torch.tensor([[1] * 12, [1] * 8 + [0] * 4])
    return model, (torch.randint(0, 100, (2, 12)), mask)


def gpt2_block() -> Made:
    config = GPT2Config(n_embd=64, n_head=4, n_positions=32, n_layer=1)
    config._attn_implementation = "sdpa"
    return GPT2Block(config, layer_idx=0).eval(), torch.randn(2, 10, 64)


def lstm_cell() -> Made:
    return nn.LSTMCell(8, 16).eval(), (torch.randn(3, 8), (torch.randn(3, 16), torch.randn(3, 16)))


class Residual(nn.Module):
    """The basic block of ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)])
        self.shorter = nn.Identity()
        if stride != 1 or inputs != outputs:
            short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shorter = nn.Sequential(short, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(self.norms[1](self.second(y)) + self.shorter(x))


def resnet18() -> Made:
    """Return ResNet-18 with a sixteenth of its channels."""
    widths = [4, 4, 8, 8, 16, 16, 32, 32]
    before = [4, *widths]
    stem = [nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()]
    blocks = [Residual(i, o, 1 if i == o else 2) for i, o in zip(before[:-1], widths, strict=True)]
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    model = nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *blocks, *end)
    return with_statistics(model), torch.randn(2, 3, 64, 64)


class Inverted(nn.Module):
    """The inverted residual of MobileNetV2."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.adds = stride == 1 and inputs == outputs
        self.layers = nn.Sequential(
            *_normed(inputs, hidden, 1),
            *_normed(hidden, hidden, 3, stride=stride, padding=1, groups=hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


def _normed(inputs: int, outputs: int, kernel: int, **named: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, bias=False, **named)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU6()]


def mobilenet_v2() -> Made:
    """Return MobileNetV2 with a fraction of its channels, and one block of each kind."""
    blocks = [Inverted(8, 8, 1, 1), Inverted(8, 12, 2, 6), Inverted(12, 12, 1, 6)]
    blocks += [Inverted(12, 16, 2, 6), Inverted(16, 16, 1, 6), Inverted(16, 24, 1, 6)]
    end = [*_normed(24, 64, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    model = nn.Sequential(*_normed(3, 8, 3, stride=2, padding=1), *blocks, *end)
    return with_statistics(model), torch.randn(2, 3, 32, 32)


class UNet(nn.Module):
    """Two levels, with a transposed convolution and a bilinear enlargement."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.middle = _double(3, 8), _double(8, 16), _double(16, 32)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.left, self.right = _double(32, 16), _double(24, 8)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.first(x)
        b = self.second(functional.max_pool2d(a, 2))
        c = self.up(self.middle(functional.max_pool2d(b, 2)))
        d = self.left(torch.cat([c, b], 1))
        d = functional.interpolate(d, scale_factor=2, mode="bilinear", align_corners=True)
        return self.out(self.right(torch.cat([d, a], 1)))


def _double(inputs: int, outputs: int) -> nn.Sequential:
    first, second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, 1, 1)
    norms = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
    return nn.Sequential(first, norms[0], nn.ReLU(), second, norms[1], nn.ReLU())


def unet() -> Made:
    return with_statistics(UNet()), torch.randn(1, 3, 32, 32)


class DLRM(nn.Module):
    """A recommendation model: bags of rows, and the products of all pairs of features."""

    def __init__(self) -> None:
        super().__init__()
        modes = ("sum", "mean", "sum")
        self.bags = nn.ModuleList([nn.EmbeddingBag(50, 16, mode=mode) for mode in modes])
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(22, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(
        self, dense: torch.Tensor, indices: list[torch.Tensor], offsets: list[torch.Tensor]
    ) -> torch.Tensor:
        x = self.bottom(dense)
        bags = [b(i, o) for b, i, o in zip(self.bags, indices, offsets, strict=True)]
        features = torch.stack([x, *bags], 1)
        products = torch.bmm(features, features.transpose(1, 2))
        rows, columns = torch.tril_indices(4, 4, -1)
        return torch.sigmoid(self.top(torch.cat([x, products[:, rows, columns]], 1)))


def dlrm() -> Made:
    """Return a DLRM; one of its bags is empty."""
    offsets = torch.tensor([0, 2, 5, 5])
    indices = [torch.randint(0, 50, (9,)) for _ in range(3)]
    return DLRM().eval(), (torch.randn(4, 13), indices, [offsets] * 3)


MODELS: dict[str, Callable[[], Made]] = {
    "bert": bert,
    "resnet18": resnet18,
    "mobilenet_v2": mobilenet_v2,
    "lstm_cell": lstm_cell,
    "gpt2_block": gpt2_block,
    "unet": unet,
    "dlrm": dlrm,
}
