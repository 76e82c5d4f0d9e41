"""Small transformer layers that several test files compile, and a joint function."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tvmbridge.core.types import PassRecord
from tvmbridge.differentiation.differentiate import JointModule, differentiate
from tvmbridge.frontend import import_graph
from tvmbridge.graph_capture.capture import capture


class TransformerLayer(nn.Module):
    """Attention with two heads, norms, dropout and a feed-forward part, on 8 features."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (self._heads(f(x)) for f in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1)
        mixed = mixed.transpose(1, 2).reshape(x.shape)
        x = self.first(x + self.dropout(self.out(mixed)))
        return self.second(x + self.down(functional.gelu(self.up(x))))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], 2, 4).transpose(1, 2)


def _bert_config(width: int, heads: int, **options: Any) -> Any:
    from transformers import BertConfig

    sizes = {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": 2 * width}
    return BertConfig(**{**sizes, **options})


def bert_layer(
    attention: str = "sdpa", width: int = 32, heads: int = 2, **options: Any
) -> nn.Module:
    """Return a BertLayer in train mode; ``options``: further fields of its configuration."""
    # The import takes a second, and most files that import this one need no transformers.
    from transformers.models.bert.modeling_bert import BertLayer

    layer: nn.Module = BertLayer(
        _bert_config(width, heads, attn_implementation=attention, **options)
    )
    return layer


def bert_model(
    kind: str = "BertModel", width: int = 32, heads: int = 2, layers: int = 1, **options: Any
) -> nn.Module:
    """Return one of transformers' BERTs; ``options``: further fields of its configuration."""
    import transformers

    config = _bert_config(width, heads, num_hidden_layers=layers, **options)
    model: nn.Module = getattr(transformers, kind)(config)
    return model


@dataclass(frozen=True)
class Differentiated:
    """A joint function, and the records of the passes that produced it."""

    joint: JointModule
    records: tuple[PassRecord, ...]


@functools.cache
def transformer_joint() -> Differentiated:
    """Return the joint function of a float64 :class:`TransformerLayer`, for all parameters."""
    module = TransformerLayer().double()
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    captured = capture(module, (x,), needs_grad=True)
    wanted = [d.name for d in captured.inputs if d.requires_grad]
    records: list[PassRecord] = []
    joint = differentiate(import_graph(captured).mod, wanted, [0], records)
    return Differentiated(joint, tuple(records))
