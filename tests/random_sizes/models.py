"""Ten models, their arguments at given sizes, and the dimensions that have each size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.models import TransformerLayer, bert_model

Sizes = Sequence[int]


@dataclass(frozen=True)
class Model:
    """A model and its calls.

    Args:
        build: returns a new module.
        arguments: returns the arguments of a call from its sizes.
        ranges: the smallest and largest size of each symbol.
        places: for each symbol, the dimensions that have its size, as pairs of an argument's index
            and a dimension. Empty if the sizes cannot be declared.
        trains: whether the model is called in train mode too.
        run: calls the module, perhaps several times; None for one plain call.
    """

    build: Callable[[], nn.Module]
    arguments: Callable[..., tuple[torch.Tensor, ...]]
    ranges: tuple[tuple[int, int], ...]
    places: tuple[tuple[tuple[int, int], ...], ...]
    trains: bool = True
    run: Callable[[nn.Module, tuple[torch.Tensor, ...]], Any] | None = None

    def call(self, module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> Any:
        """Call the module with ``arguments``, and return the results."""
        return module(*arguments) if self.run is None else self.run(module, arguments)


class _Language(nn.Module):
    """A language model: token and position embeddings, causal attention, next-token loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 16), nn.Embedding(160, 16)
        self.project, self.norm = nn.Linear(16, 48), nn.LayerNorm(16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        q, k, v = self.project(x).view(*ids.shape, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.norm(x + attended.transpose(1, 2).reshape(x.shape))
        logits = (x @ self.tokens.weight.t())[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class _Images(nn.Module):
    """Convolutions, batch norm and pooling to a fixed size; batch, height and width vary."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8)
        self.second, self.out = nn.Conv2d(8, 8, 3, 1, 1), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.first(x)))
        x = x + functional.gelu(self.second(x))
        return self.out(x.mean((2, 3)))


class _Sequence(nn.Module):
    """A one-dimensional U-Net: convolutions, pooling, upsampling, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv1d(4, 8, 3, padding=1), nn.Conv1d(8, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.silu(self.norm(self.down(x)))
        y = functional.avg_pool1d(y, 3, stride=1, padding=1)
        return (x + self.up(y)).cumsum(-1) / x.shape[-1]


class _Recurrent(nn.Module):
    """An LSTM, and attention of the last state over all states."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, (last, _) = self.cell(x)
        weights = torch.softmax(states @ last[-1].unsqueeze(-1), 1)
        return self.out((states * weights).sum(1))


class _Pairs(nn.Module):
    """Distances of all pairs of two point sets, with a mask, minima, and sums along both sets."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        apart = (self.left(x)[:, None] - self.right(y)[None]).square().sum(-1)
        near = torch.where(apart < apart.mean(), apart, apart.amax(1, keepdim=True))
        return near.softmax(0) @ y, near.logsumexp(1), torch.cat([x, y]).std(0)


class _Tabular(nn.Module):
    """A model of table rows: numbers, categories, batch norm, dropout, pairwise products."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20, 8) for _ in range(3))
        self.dense, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.out, self.dropout = nn.Linear(14, 1), nn.Dropout(0.2)

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        dense = self.norm(self.dense(numbers)).relu()
        features = torch.stack(
            [dense, *(t(i) for t, i in zip(self.tables, ids.unbind(1), strict=True))], 1
        )
        i, j = torch.triu_indices(4, 4, 1).unbind(0)
        crossed = (features @ features.mT)[:, i, j]
        return self.out(self.dropout(torch.cat([dense, crossed], 1))).sigmoid()


def _bert() -> nn.Module:
    sizes = {"vocab_size": 50, "max_position_embeddings": 160}
    return bert_model("BertForSequenceClassification", width=16, **sizes)


def _run_bert(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> Any:
    ids, mask, labels = arguments
    found = module(input_ids=ids, attention_mask=mask, labels=labels)
    return found.loss, found.logits


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=160,
        )
    )


def _gpt() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=160, n_embd=16, n_layer=1, n_head=2)
    )


def _run_decoder(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> Any:
    """Run a prompt, and then four tokens one by one with a growing cache."""
    from transformers import DynamicCache

    (ids,), cache = arguments, DynamicCache()
    prompt = module(input_ids=ids[:, :-4], past_key_values=cache, use_cache=True)
    found = [prompt.logits]
    for place in range(4, 0, -1):
        token = ids[:, ids.shape[1] - place, None]
        found.append(module(input_ids=token, past_key_values=cache, use_cache=True).logits)
    return tuple(found)


def _run_llama(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> Any:
    (ids,) = arguments
    found = module(input_ids=ids, labels=ids, use_cache=False)
    return found.loss, found.logits


def _ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 50, (batch, length))


def _padded(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    mask = (torch.arange(length) < torch.randint(1, length + 1, (batch, 1))).long()
    return _ids(batch, length), mask, torch.randint(0, 2, (batch,))


_ROWS, _LENGTHS = (1, 40), (2, 120)

MODELS: dict[str, Model] = {
    "language": Model(
        _Language, lambda b, n: (_ids(b, n),), (_ROWS, _LENGTHS), (((0, 0),), ((0, 1),))
    ),
    "transformer": Model(
        TransformerLayer,
        lambda b, n: (torch.randn(b, n, 8),),
        (_ROWS, _LENGTHS),
        (((0, 0),), ((0, 1),)),
    ),
    "images": Model(
        _Images,
        lambda b, h, w: (torch.randn(b, 3, h, w),),
        ((2, 24), (4, 40), (4, 40)),
        (((0, 0),), ((0, 2),), ((0, 3),)),
    ),
    "sequence": Model(
        _Sequence, lambda b, n: (torch.randn(b, 4, n),), (_ROWS, _LENGTHS), (((0, 0),), ((0, 2),))
    ),
    "recurrent": Model(
        _Recurrent, lambda b, n: (torch.randn(b, n, 6),), (_ROWS, (2, 40)), (((0, 0),), ((0, 1),))
    ),
    "pairs": Model(
        _Pairs,
        lambda n, m: (torch.randn(n, 5), torch.randn(m, 5)),
        ((2, 90), (2, 90)),
        (((0, 0),), ((1, 0),)),
    ),
    "tabular": Model(
        _Tabular,
        lambda n: (torch.randn(n, 6), torch.randint(0, 20, (n, 3))),
        ((2, 300),),
        (((0, 0), (1, 0)),),
    ),
    "bert": Model(
        _bert,
        _padded,
        (_ROWS, _LENGTHS),
        (((0, 0), (1, 0), (2, 0)), ((0, 1), (1, 1))),
        run=_run_bert,
    ),
    "llama": Model(
        _llama,
        lambda b, n: (_ids(b, n),),
        (_ROWS, _LENGTHS),
        (((0, 0),), ((0, 1),)),
        run=_run_llama,
    ),
    "decoder": Model(
        _gpt,
        lambda b, n: (_ids(b, n + 4),),
        ((1, 6), (1, 100)),
        (),
        trains=False,
        run=_run_decoder,
    ),
}
