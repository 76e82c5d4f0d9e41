"""The models of ``benchmarks.any_size_shares``: small, with the operators of large models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.models import bert_model
from tests.random_sizes.models import Model

_VOCABULARY = 64
_ROWS, _LENGTHS = (1, 12), (1, 60)
_ROW = {"vocab_size": _VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BATCH_AND_LENGTH = (((0, 0), (1, 0)), ((0, 1), (1, 1)))


def bert() -> nn.Module:
    """Return a BertModel of one layer."""
    return bert_model(vocab_size=_VOCABULARY)


def gpt2() -> nn.Module:
    """Return a GPT-2 of one block."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**_ROW, n_embd=32, n_layer=1, n_head=2))


def llama() -> nn.Module:
    """Return a Llama of one layer whose heads share keys."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            **_ROW,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
        )
    )


def t5() -> nn.Module:
    """Return a T5 of one layer."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=_VOCABULARY, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2
    )
    config.decoder_start_token_id = config.pad_token_id
    return T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    """Return a ViT of one layer with patches of 8."""
    from transformers import ViTConfig, ViTModel

    return ViTModel(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=32,
            patch_size=8,
        )
    )


class _Block(nn.Module):
    """Two convolutions with batch norm, and a shortcut."""

    def __init__(self, width: int, wider: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, wider, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(wider, wider, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(wider) for _ in range(3))
        self.shortcut = nn.Conv2d(width, wider, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[1](self.second(functional.relu(self.norms[0](self.first(x)))))
        return functional.relu(y + self.norms[2](self.shortcut(x)))


class ResNet(nn.Module):
    """A stem with max pooling, two blocks, the mean over the image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        self.pool, self.average = nn.MaxPool2d(3, 2, 1), nn.AdaptiveAvgPool2d(1)
        self.blocks = nn.Sequential(_Block(8, 8, 1), _Block(8, 16, 2))
        self.out = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(functional.relu(self.norm(self.stem(x))))
        return self.out(self.average(self.blocks(x)).flatten(1))


class UNet(nn.Module):
    """A U-Net of one level: downsampling, a transposed convolution, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 2, 3, padding=1)
        self.norm = nn.GroupNorm(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = functional.silu(self.norm(self.down(x)))
        deep = functional.silu(self.middle(functional.max_pool2d(wide, 2)))
        return self.last(torch.cat([wide, self.up(deep)], 1))


class Recurrent(nn.Module):
    """A bidirectional LSTM of two layers, and a linear layer on all states."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(8, 16, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cell(x)[0])


class DLRM(nn.Module):
    """A DLRM: bags of embeddings, a bottom and a top MLP, dot products of all feature pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(40, 16, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(22, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        rows = [x, *(t(ids[:, i]) for i, t in enumerate(self.tables))]
        features = torch.stack(rows, 1)
        i, j = torch.triu_indices(4, 4, 1).unbind(0)
        crossed = torch.bmm(features, features.transpose(1, 2))[:, i, j]
        return torch.sigmoid(self.top(torch.cat([x, crossed], 1)))


class SAGE(nn.Module):
    """Two layers of GraphSAGE: the mean of the neighbours, and the node itself."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 4)])
        self.others = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 4)])

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges[0], edges[1]
        for own, others in zip(self.own, self.others, strict=True):
            total = x.new_zeros(x.shape).index_add(0, target, x[source])
            count = x.new_zeros(x.shape[0]).index_add(0, target, x.new_ones(target.shape[0]))
            x = functional.relu(own(x) + others(total / count.clamp(min=1).unsqueeze(1)))
        return x


def ids(rows: int, length: int) -> torch.Tensor:
    """Return random token ids, none of which is a special token."""
    return torch.randint(3, _VOCABULARY, (rows, length))


def _masked(rows: int, length: int) -> tuple[torch.Tensor, ...]:
    mask = (torch.arange(length) < torch.randint(1, length + 1, (rows, 1))).long()
    return ids(rows, length), mask


def _run_masked(module: nn.Module, given: tuple[torch.Tensor, ...]) -> Any:
    return module(input_ids=given[0], attention_mask=given[1])[0]


def _run_causal(module: nn.Module, given: tuple[torch.Tensor, ...]) -> Any:
    return module(input_ids=given[0], attention_mask=given[1], use_cache=False)[0]


def _run_t5(module: nn.Module, given: tuple[torch.Tensor, ...]) -> Any:
    tokens, mask, labels = given
    return module(input_ids=tokens, attention_mask=mask, labels=labels, use_cache=False)[0]


def _run_vit(module: nn.Module, given: tuple[torch.Tensor, ...]) -> Any:
    return module(pixel_values=given[0], interpolate_pos_encoding=True)[0]


# By model, the names of the arguments whose sizes vary, in order.
NAMES = {
    "bert": ("input_ids", "attention_mask"),
    "gpt2": ("input_ids", "attention_mask"),
    "llama": ("input_ids", "attention_mask"),
    "t5": ("input_ids", "attention_mask", "labels"),
    "vit": ("pixel_values",),
}
# By model, the names of arguments that are no tensors.
CONSTANTS = {
    "gpt2": ("use_cache",),
    "llama": ("use_cache",),
    "t5": ("use_cache",),
    "vit": ("interpolate_pos_encoding",),
}

MODELS: dict[str, Model] = {
    "bert": Model(bert, _masked, (_ROWS, _LENGTHS), _BATCH_AND_LENGTH, run=_run_masked),
    "gpt2": Model(gpt2, _masked, (_ROWS, _LENGTHS), _BATCH_AND_LENGTH, run=_run_causal),
    "llama": Model(llama, _masked, (_ROWS, _LENGTHS), _BATCH_AND_LENGTH, run=_run_causal),
    "t5": Model(
        t5,
        lambda b, n, m: (*_masked(b, n), ids(b, m)),
        (_ROWS, _LENGTHS, _LENGTHS),
        (((0, 0), (1, 0), (2, 0)), ((0, 1), (1, 1)), ((2, 1),)),
        run=_run_t5,
    ),
    "vit": Model(
        vit,
        lambda b, h, w: (torch.randn(b, 3, 8 * h, 8 * w),),
        (_ROWS, (2, 9), (2, 9)),
        (((0, 0),), ((0, 2),), ((0, 3),)),
        run=_run_vit,
    ),
    "resnet": Model(
        ResNet,
        lambda b, h, w: (torch.randn(b, 3, h, w),),
        ((2, 12), (17, 64), (17, 64)),
        (((0, 0),), ((0, 2),), ((0, 3),)),
    ),
    "unet": Model(
        UNet,
        lambda b, h, w: (torch.randn(b, 3, 2 * h, 2 * w),),
        (_ROWS, (4, 24), (4, 24)),
        (((0, 0),), ((0, 2),), ((0, 3),)),
    ),
    "lstm": Model(
        Recurrent,
        lambda b, n: (torch.randn(b, n, 8),),
        (_ROWS, _LENGTHS),
        (((0, 0),), ((0, 1),)),
    ),
    "dlrm": Model(
        DLRM,
        lambda b, n: (torch.randn(b, 13), torch.randint(0, 40, (b, 3, n))),
        ((1, 200), (1, 20)),
        (((0, 0), (1, 0)), ((1, 2),)),
    ),
    "sage": Model(
        SAGE,
        lambda n, e: (torch.randn(n, 8), torch.randint(0, n, (2, e))),
        ((2, 200), (1, 900)),
        (((0, 0),), ((1, 1),)),
    ),
}
