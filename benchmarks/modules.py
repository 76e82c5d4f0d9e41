"""The modules whose memory is measured: a BertLayer, a GPT-2 block and a small ResNet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import nn
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from tests.end_to_end.steps import base_layer

Made = tuple[nn.Module, torch.Tensor]


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm, and a shortcut around them."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.past: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            norm = nn.BatchNorm2d(width)
            self.past = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(y)) + self.past(x))


class ResNet(nn.Module):
    """ResNet-18's structure for small images, with ``width`` channels in the first stage."""

    def __init__(self, width: int = 16, stages: int = 4, blocks: int = 2) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        channels = width
        for stage in range(stages):
            for number in range(blocks):
                stride = 2 if stage and not number else 1
                layers.append(ResidualBlock(channels, width << stage, stride))
                channels = width << stage
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean((2, 3)))


def bert_layer(attention: str, batch: int = 8, tokens: int = 128) -> Made:
    """Return a BertLayer of BERT-base in train mode with dropout 0.1, and its hidden states."""
    layer = base_layer(attention)
    return layer, torch.randn(batch, tokens, 768, requires_grad=True)


def gpt2_block(attention: str, batch: int = 8, tokens: int = 128) -> Made:
    """Return a block of GPT-2 small in train mode with dropout 0.1, and its hidden states."""
    torch.manual_seed(7)
    config = GPT2Config(attn_implementation=attention)
    block: nn.Module = GPT2Block(config, layer_idx=0).train()
    return block, torch.randn(batch, tokens, 768, requires_grad=True)


def resnet() -> Made:
    """Return a ResNet of 16 channels in train mode, and a batch of 8 images."""
    torch.manual_seed(7)
    return ResNet().train(), torch.randn(8, 3, 32, 32)


MODULES: Mapping[str, Callable[[], Made]] = MappingProxyType(
    {
        "BertLayer, eager attention": lambda: bert_layer("eager"),
        "BertLayer, sdpa": lambda: bert_layer("sdpa"),
        "GPT-2 block, eager attention": lambda: gpt2_block("eager"),
        "GPT-2 block, sdpa": lambda: gpt2_block("sdpa"),
        "ResNet": resnet,
    }
)
