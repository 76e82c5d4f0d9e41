"""The models of ``benchmarks.pipeline``, without dropout, each with a batch."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import nn

from tvmbridge.demo.minilm import PACKAGE, load_bert

MODELS = ("minilm", "gpt2", "bert-large", "blocks")
_TOKENS = 32


class Classified(nn.Module):
    """BERT with a linear head over the mean of its token vectors."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert
        self.head = nn.Linear(bert.config.hidden_size, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.bert(input_ids=tokens).last_hidden_state.mean(1))


class Logits(nn.Module):
    """A language model that returns its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


class Blocks(nn.Module):
    """Residual feed-forward blocks; ``inner`` has the hidden width of each block."""

    def __init__(self, inner: list[int], width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, n) for n in inner))
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy over all positions."""
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def model_of(name: str, dtype: torch.dtype, batch: int) -> tuple[nn.Module, Any, Any]:
    """Return a model, inputs and targets; the weights are the same each time."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    if name == "blocks":
        on_gpu = torch.cuda.is_available()
        width = 1024 if on_gpu else 128
        places = 512 if on_gpu else 64
        module: nn.Module = Blocks([4 * width] * 16, width)
        inputs = torch.randn(batch, places, width, generator=generator, dtype=dtype)
        targets = torch.randint(0, 8, (batch, places), generator=generator)
        return module.to(dtype).train(), inputs, targets
    module = _transformer(name).to(dtype).train()
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if hasattr(part, "dropout_prob"):
            part.dropout_prob = 0.0
    places = 128 if name == "bert-large" else _TOKENS
    inputs = torch.randint(0, 1000, (batch, places), generator=generator)
    shape = (batch, places) if name == "gpt2" else (batch,)
    return module, inputs, torch.randint(0, 4, shape, generator=generator)


def _transformer(name: str) -> nn.Module:
    transformers = importlib.import_module("transformers")
    if name == "minilm":
        bert = load_bert() if importlib.util.find_spec(PACKAGE) else _untrained(transformers)
        bert.config.attention_probs_dropout_prob = 0.0
        return Classified(bert)
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=6, n_embd=192, n_head=6, vocab_size=1000, n_positions=64, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return Logits(transformers.GPT2LMHeadModel(config))
    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return Classified(transformers.BertModel(config, add_pooling_layer=False))


def _untrained(transformers: Any) -> Any:
    """Return MiniLM with random weights, for machines without the package of trained weights."""
    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    return transformers.BertModel(config).eval()


def blocks_model(name: str, batch: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return the stack of blocks with a name such as ``16 mixed``, inputs and targets."""
    count, kind = name.split()
    n, width = int(count), 1024 if torch.cuda.is_available() else 128
    factor = {
        "alike": lambda i: 4,
        "growing": lambda i: 1 + i,
        "shrinking": lambda i: n - i,
        "mixed": lambda i: (1, 8, 2, 5)[i % 4],
    }[kind]
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    module = Blocks([width * factor(i) for i in range(n)], width).train()
    inputs = torch.randn(batch, 64, width, generator=generator)
    return module, inputs, torch.randint(0, 8, (batch, 64), generator=generator)
