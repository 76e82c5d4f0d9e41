"""The suites of ``python -m benchmarks``: whole models and blocks, with inputs and bounds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertModel
from transformers.models.bert.modeling_bert import BertLayer

from benchmarks.modules import ResidualBlock
from tests.gpu.blocks import Block, LlamaBlock

MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}


@dataclass(frozen=True)
class Suite:
    """A row: a module with its input.

    - ``make``: builds the module; ``shape``: the shape of the input.
    - ``train``: whether a step has a backward.
    - ``vocabulary``: the number of token ids if the input has token ids, otherwise 0.
    - ``live``, ``frozen``: upper bounds of tvmbridge's time over the best peer's, with live and
      with frozen weights; None: no bound.
    - ``quick``: whether ``--quick`` includes the row.
    - ``dtype``: of parameters, buffers and inputs that are no token ids.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    train: bool = False
    vocabulary: int = 0
    live: float | None = None
    frozen: float | None = None
    quick: bool = True
    dtype: torch.dtype = torch.float32

    def module(self) -> nn.Module:
        """Return the module, whose result is one tensor; the weights are the same each time."""
        torch.manual_seed(7)
        return _First(self.make()).train(self.train).to(self.dtype)

    def sample(self) -> torch.Tensor:
        """Return an input; in training it requires a gradient, unless it has token ids."""
        generator = torch.Generator().manual_seed(1)
        if self.vocabulary:
            return torch.randint(self.vocabulary, self.shape, generator=generator)
        x = torch.randn(self.shape, generator=generator).to(self.dtype)
        return x.requires_grad_(self.train)


class _First(nn.Module):
    """A module that returns the first result alone, because some peers need one tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: Any = self.inner(x)
        return result if isinstance(result, torch.Tensor) else result[0]


def _bert(**sizes: Any) -> Callable[[], nn.Module]:
    return lambda: BertModel(BertConfig(return_dict=False, **sizes), add_pooling_layer=False)


class _ResNet18(nn.Sequential):
    """ResNet-18 for images of 224 times 224."""

    def __init__(self) -> None:
        layers: list[nn.Module] = [
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        ]
        channels = 64
        for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            layers += [ResidualBlock(channels, width, stride), ResidualBlock(width, width, 1)]
            channels = width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def _convolutions(channels: int, width: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for given in (channels, width):
        parts += [nn.Conv2d(given, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*parts)


class _UNet(nn.Module):
    """A U-Net: three downsampling and three upsampling steps, with skip connections."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        widths = [width << i for i in range(4)]
        self.down = nn.ModuleList(
            _convolutions(a, b) for a, b in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in widths[-2::-1])
        self.beside = nn.ModuleList(_convolutions(2 * w, w) for w in widths[-2::-1])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for number, part in enumerate(self.down):
            x = part(nn.functional.max_pool2d(x, 2) if number else x)
            kept.append(x)
        for up, beside, other in zip(self.up, self.beside, kept[-2::-1], strict=True):
            x = beside(torch.cat([up(x), other], 1))
        return self.head(x)


class _LanguageModel(nn.Module):
    """An LSTM of two layers between an embedding and a linear layer."""

    def __init__(self, vocabulary: int = 10000, width: int = 256) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.layers = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.table(x))[0])


class _Chains(nn.Module):
    """tanh(LayerNorm(x_i)) on 100 slices x_i of the input, concatenated."""

    def __init__(self, count: int = 100, width: int = 64) -> None:
        super().__init__()
        self.width = width
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces = x.split(self.width, 1)
        return torch.cat(
            [torch.tanh(norm(p)) for norm, p in zip(self.norms, pieces, strict=True)], 1
        )


def _small() -> nn.Module:
    sizes = [256, 512, 512, 256, 64]
    parts: list[nn.Module] = []
    for depth, width in itertools.pairwise(sizes):
        parts += [nn.Linear(depth, width), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def _several(make: Callable[[], nn.Module], count: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(make() for _ in range(count)))


def _layer() -> nn.Module:
    return BertLayer(BertConfig(attn_implementation="sdpa"))


def _gpt2() -> nn.Module:
    return Block(768, 12, causal=True)


def _llama() -> nn.Module:
    return LlamaBlock(512, 8, 128)


def _vit() -> nn.Module:
    return Block(768, 12, causal=False)


_MODULES: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "bert-layer 1x14": (_layer, (1, 14, 768), 0),
    "bert-layer 8x128": (_layer, (8, 128, 768), 0),
    "bert-base 1x14": (_bert(), (1, 14), 30000),
    "bert-base 1x128": (_bert(), (1, 128), 30000),
    "bert-base 2x128": (_bert(), (2, 128), 30000),
    "minilm 32x32": (_bert(num_attention_heads=12, **MINILM), (32, 32), 30000),
    "gpt2-block 4x128": (_gpt2, (4, 128, 768), 0),
    "llama-block 4x128": (_several(_llama, 2), (4, 128, 512), 0),
    "vit 4x197": (_several(_vit, 2), (4, 197, 768), 0),
    "resnet18 4x224": (_ResNet18, (4, 3, 224, 224), 0),
    "unet 2x96": (_UNet, (2, 3, 96, 96), 0),
    "lstm-lm 8x32": (_LanguageModel, (8, 32), 10000),
    "dlrm-chains 256": (_Chains, (256, 6400), 0),
    "mlp-small 64": (_small, (64, 256), 0),
}
# Bounds by row, for live and frozen weights: tvmbridge's time over the best peer's.
_INFERENCE: Mapping[str, tuple[float | None, float | None]] = {
    "bert-layer 1x14": (None, None),
    "bert-base 1x14": (0.75, 1.0),
    "bert-base 1x128": (0.92, 1.0),
    "minilm 32x32": (0.85, 1.0),
    "gpt2-block 4x128": (None, 1.05),
    "llama-block 4x128": (None, 1.05),
    "vit 4x197": (None, 1.05),
    "resnet18 4x224": (None, 1.05),
    "unet 2x96": (None, 1.05),
    "lstm-lm 8x32": (None, None),
    "dlrm-chains 256": (0.5, None),
    "mlp-small 64": (0.9, None),
}
_TRAINING: Mapping[str, float | None] = {
    "bert-layer 8x128": 0.9,
    "bert-base 2x128": 0.9,
    "minilm 32x32": 0.9,
    "gpt2-block 4x128": 0.9,
    "llama-block 4x128": 0.9,
    "vit 4x197": 0.9,
    "resnet18 4x224": 0.95,
    "unet 2x96": 0.95,
    "lstm-lm 8x32": 0.95,
    "dlrm-chains 256": 0.5,
    "mlp-small 64": 0.9,
}
_QUICK = ("bert-layer 1x14", "gpt2-block 4x128", "unet 2x96", "mlp-small 64")


def _suites() -> dict[str, Suite]:
    found = {}
    for name, (live, frozen) in _INFERENCE.items():
        make, shape, vocabulary = _MODULES[name]
        found[f"{name} inference"] = Suite(
            make, shape, False, vocabulary, live, frozen, name in _QUICK
        )
    make, shape, vocabulary = _MODULES["bert-base 1x128"]
    found["bert-base 1x128 bfloat16 inference"] = Suite(
        make, shape, False, vocabulary, None, 1.0, False, torch.bfloat16
    )
    for name, live in _TRAINING.items():
        make, shape, vocabulary = _MODULES[name]
        quick = name == "mlp-small 64"
        found[f"{name} training"] = Suite(make, shape, True, vocabulary, live, None, quick)
    return found


SUITES: Mapping[str, Suite] = MappingProxyType(_suites())
"""All rows by name."""
