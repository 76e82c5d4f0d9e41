"""The rows of ``benchmarks.gpu``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import BertConfig, BertModel
from transformers.models.bert.modeling_bert import BertLayer

from tests.gpu.blocks import Block, Chains, LlamaBlock

FULL, HALF = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A row of the benchmark.

    - ``make``: builds the module for a dropout probability.
    - ``shape``, ``dtype``: of the input; ``dtype`` also of the parameters.
    - ``bound``: upper bound of tvmbridge's time over the best other candidate's.
    - ``vocabulary``: the number of token ids if the input has token ids, otherwise 0.
    """

    make: Callable[[float], nn.Module]
    shape: tuple[int, ...]
    dtype: torch.dtype
    train: bool
    bound: float
    vocabulary: int = 0

    def sample(self) -> torch.Tensor:
        """Return an input on the GPU; in training it requires a gradient, unless it has indices."""
        torch.manual_seed(1)
        if self.vocabulary:
            return torch.randint(0, self.vocabulary, self.shape, device="cuda")
        x = torch.randn(self.shape, device="cuda", dtype=self.dtype)
        return x.requires_grad_(self.train)

    def module(self, dropout: float) -> nn.Module:
        """Return the module on the GPU, with the same weights each time."""
        torch.manual_seed(0)
        return self.make(dropout).train(self.train).to("cuda", self.dtype)


class _Encoder(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.bert = BertModel(_config(dropout), add_pooling_layer=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.bert(ids).last_hidden_state
        return hidden


def _config(dropout: float) -> BertConfig:
    return BertConfig(
        attn_implementation="sdpa",
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )


def _layer(dropout: float) -> nn.Module:
    layer: nn.Module = BertLayer(_config(dropout))
    return layer


def _gpt2(_dropout: float) -> nn.Module:
    return Block(768, 12, causal=True)


def _llama(_dropout: float) -> nn.Module:
    return LlamaBlock(1024, 16, 512)


def _vit(_dropout: float) -> nn.Module:
    return Block(768, 12, causal=False)


def _chains(_dropout: float) -> nn.Module:
    return Chains()


def cases_by_name() -> dict[str, Case]:
    """Return all rows by name."""
    return {
        "layer inference 1x14 f32": Case(_layer, (1, 14, 768), FULL, False, 0.70),
        "layer inference 8x128 f32": Case(_layer, (8, 128, 768), FULL, False, 0.90),
        "layer inference 8x128 bf16": Case(_layer, (8, 128, 768), HALF, False, 0.90),
        "layer training 1x14 f32": Case(_layer, (1, 14, 768), FULL, True, 0.50),
        "layer training 8x128 bf16": Case(_layer, (8, 128, 768), HALF, True, 0.60),
        "layer training 8x128 f32": Case(_layer, (8, 128, 768), FULL, True, 0.85),
        "layer training 32x512 bf16": Case(_layer, (32, 512, 768), HALF, True, 0.95),
        "base inference 1x14 f32": Case(_Encoder, (1, 14), FULL, False, 0.70, 30000),
        "base inference 8x128 bf16": Case(_Encoder, (8, 128), HALF, False, 0.85, 30000),
        "base inference 32x512 bf16": Case(_Encoder, (32, 512), HALF, False, 0.95, 30000),
        "gpt2 training 8x512 bf16": Case(_gpt2, (8, 512, 768), HALF, True, 0.80),
        "llama training 8x512 bf16": Case(_llama, (8, 512, 1024), HALF, True, 0.80),
        "vit training 8x197 bf16": Case(_vit, (8, 197, 768), HALF, True, 0.80),
        "chains inference f32": Case(_chains, (100, 32, 64), FULL, False, 0.60),
    }
