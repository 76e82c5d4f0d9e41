"""Factories of the layers that ``make tune`` tunes; tvmbridge ships their tuning records."""

from __future__ import annotations

import torch
from torch import nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertLayer

MINILM = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}

Sample = tuple[nn.Module, torch.Tensor]


def _layer(rows: int, tokens: int, *, train: bool, **sizes: int) -> Sample:
    config = BertConfig(attn_implementation="sdpa", **sizes)
    layer: nn.Module = BertLayer(config).train(train)
    hidden = torch.randn(rows, tokens, config.hidden_size, requires_grad=train)
    return layer, hidden


def bert_1x14() -> Sample:
    """Return BERT-base's layer in eval mode, with one sentence of 14 tokens."""
    return _layer(1, 14, train=False)


def bert_1x128() -> Sample:
    """Return BERT-base's layer in eval mode, with one sentence of 128 tokens."""
    return _layer(1, 128, train=False)


def bert_training() -> Sample:
    """Return BERT-base's layer in train mode with dropout 0.1, with 8 sentences of 128 tokens."""
    return _layer(8, 128, train=True)


def minilm_1x14() -> Sample:
    """Return MiniLM's layer in eval mode, with one sentence of 14 tokens."""
    return _layer(1, 14, train=False, **MINILM)


def minilm_1x128() -> Sample:
    """Return MiniLM's layer in eval mode, with one sentence of 128 tokens."""
    return _layer(1, 128, train=False, **MINILM)


def minilm_training() -> Sample:
    """Return MiniLM's layer in train mode with dropout 0.1, with 8 sentences of 128 tokens."""
    return _layer(8, 128, train=True, **MINILM)
