"""Small models of many kinds, whose operators ``usage.py`` counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

# Settings that make a transformers configuration small, under all names that architectures use.
_SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "head_dim": 8,
    "d_kv": 8,
    "d_ff": 64,
    "intermediate_size": 64,
    "hidden_dim": 64,
    "ffn_dim": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "n_positions": 64,
    "max_position_embeddings": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_local_experts": 4,
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "pad_token_id": 0,
    "use_cache": False,
}

_OWN_SIZES: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "esm": {"vocab_size": 99},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "convnext": {"image_size": 64},
    "convnextv2": {"image_size": 64},
}

_TEXT = """
    albert bert bert-generation bloom codegen deberta deberta-v2 distilbert electra ernie esm
    falcon fnet gemma gemma2 gpt2 gpt_bigcode gpt_neo gpt_neox gptj granite llama
    megatron-bert mistral mixtral mobilebert mpnet mpt nystromformer olmo opt phi phi3 qwen2
    qwen2_moe qwen3 roberta roformer squeezebert stablelm xlm-roberta xlnet
"""
_PAIRS = "bart blenderbot m2m_100 marian mbart mt5 pegasus t5"
_VISION = """
    beit convnext convnextv2 cvt deit dinov2 dpt efficientnet mobilenet_v1 mobilenet_v2 mobilevit
    poolformer regnet resnet segformer swin swinv2 vit vit_mae
"""
_SPEECH = "hubert wav2vec2 wavlm data2vec-audio"


def _shrunk(kind: str) -> Any:
    from transformers import AutoConfig

    defaults = AutoConfig.for_model(kind).to_dict()
    small = {
        k: v for k, v in _SMALL.items() if isinstance(defaults.get(k), int) and defaults[k] != v
    }
    small["pad_token_id"] = 0
    return AutoConfig.for_model(kind, **{**small, **_OWN_SIZES.get(kind, {})})


def _transformer(kind: str) -> nn.Module:
    from transformers import AutoModel

    torch.manual_seed(0)
    model = AutoModel.from_config(_shrunk(kind))
    assert isinstance(model, nn.Module)
    return model


def _tokens() -> torch.Tensor:
    return torch.randint(3, 90, (2, 12))


def _image(channels: int = 3, size: int = 32) -> torch.Tensor:
    return torch.randn(2, channels, size, size)


def _convolution(inner: int, outer: int, **options: Any) -> nn.Sequential:
    options.setdefault("padding", 1)
    return nn.Sequential(nn.Conv2d(inner, outer, 3, **options), nn.BatchNorm2d(outer), nn.ReLU())


class _Residual(nn.Module):
    """A small ResNet, with max and average pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = _convolution(3, 8, stride=2), _convolution(8, 8)
        self.pool, self.head = nn.MaxPool2d(3, 2, 1), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.stem(x))
        x = functional.relu(x + self.body(x))
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class _Inverted(nn.Module):
    """A MobileNet block: depthwise convolutions, squeeze-and-excitation, hard-swish."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.depth = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.norm, self.down = nn.BatchNorm2d(16), nn.Conv2d(16, 4, 1)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.hardswish(self.norm(self.depth(self.up(x))))
        gate = functional.relu(self.squeeze(x.mean((2, 3), keepdim=True)))
        return self.down(x * functional.hardsigmoid(self.excite(gate)))


class _Dense(nn.Module):
    """A dense block: concatenated features, average pooling, leaky and parametric ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _convolution(3, 4), _convolution(7, 4)
        self.units = nn.Sequential(nn.PReLU(), nn.AvgPool2d(2), nn.LeakyReLU(), nn.ELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x, self.first(x)], 1)
        return self.units(torch.cat([x, self.second(x)], 1)).flatten(1)


class _Ladder(nn.Module):
    """A small U-Net: upsampling by a transposed convolution and by interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.mid = _convolution(3, 8, stride=2), _convolution(8, 8)
        self.up, self.norm = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.GroupNorm(2, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        low = self.mid(self.down(x))
        wide = functional.interpolate(low, scale_factor=2.0, mode="bilinear", align_corners=False)
        near = functional.interpolate(low, scale_factor=2.0, mode="nearest")
        return functional.silu(self.norm(self.up(low)) + wide), near


class _Recurrent(nn.Module):
    """Embedding, LSTM and GRU, and a classifier of the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 16, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(32, 16, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.gru(self.lstm(self.embed(tokens))[0])
        return functional.log_softmax(self.head(states[:, -1]), -1)


class _Recommender(nn.Module):
    """Embedding bags and their pairwise products, as in click prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.dense = nn.EmbeddingBag(99, 8, mode="mean"), nn.Linear(6, 8)
        self.top = nn.Sequential(nn.Linear(9, 4), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4, 1))

    def forward(self, tokens: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        left, right = self.bag(tokens), functional.relu(self.dense(numbers))
        product = (left * right).sum(-1, keepdim=True)
        return torch.sigmoid(self.top(torch.cat([left, product], -1))).squeeze(-1)


class _Graph(nn.Module):
    """A graph network: messages along edges, gathered and summed at their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.score = nn.Linear(16, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges[0], edges[1]
        sent = functional.elu(self.message(torch.cat([x[source], x[target]], -1)))
        weight = torch.exp(self.score(sent).clamp(max=10.0))
        total = torch.zeros_like(x).index_add(0, target, sent * weight)
        norm = torch.zeros(len(x), 1).scatter_add(0, target[:, None], weight)
        return total / (norm + 1e-6)


class _Losses(nn.Module):
    """The usual losses of classification, regression and ranking."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        goal = functional.one_hot(labels, 10).to(logits.dtype)
        loss = functional.cross_entropy(logits, labels, label_smoothing=0.1)
        loss = loss + functional.nll_loss(logits.log_softmax(-1), labels)
        loss = loss + functional.binary_cross_entropy_with_logits(logits, goal)
        loss = loss + functional.mse_loss(logits, goal) + functional.l1_loss(logits, goal)
        loss = loss + functional.smooth_l1_loss(logits, goal) + functional.huber_loss(logits, goal)
        loss = loss + functional.kl_div(logits.log_softmax(-1), goal, reduction="batchmean")
        return loss + functional.cosine_similarity(logits, goal).mean()


class _Generation(nn.Module):
    """Sampling of the next token: temperature, top-k, top-p, penalties."""

    def forward(self, logits: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        score = logits.gather(1, seen)
        score = torch.where(score < 0, score * 1.2, score / 1.2)
        logits = logits.scatter(1, seen, score) / 0.7
        limit = logits.topk(5).values[:, -1:]
        logits = logits.masked_fill(logits < limit, float("-inf"))
        ordered, order = logits.sort(descending=True)
        outside = ordered.softmax(-1).cumsum(-1) > 0.9
        kept = outside.scatter(1, order, outside)
        return logits.masked_fill(kept, float("-inf")).argmax(-1), ordered.max(-1).values


class _Volume(nn.Module):
    """Convolutions over time and over volumes, with instance norm and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Conv1d(4, 8, 3, padding=2, dilation=2), nn.GELU())
        self.volume = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.InstanceNorm3d(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        time = functional.max_pool1d(self.time(x), 2)
        volume = functional.adaptive_avg_pool3d(functional.softplus(self.volume(y)), 2)
        return functional.pad(time, (1, 1), mode="reflect"), volume


def _own() -> Iterator[tuple[str, Callable[[], nn.Module], tuple[Any, ...]]]:
    for network in (_Residual, _Inverted, _Dense, _Ladder):
        yield network.__name__.strip("_").lower(), network, (_image(),)
    yield "recurrent", _Recurrent, (_tokens(),)
    yield "recommender", _Recommender, (_tokens(), torch.randn(2, 6))
    yield "graph", _Graph, (torch.randn(6, 8), torch.randint(0, 6, (2, 9)))
    yield "losses", _Losses, (torch.randn(4, 10), torch.randint(0, 10, (4,)))
    yield "generation", _Generation, (torch.randn(2, 20), torch.randint(0, 20, (2, 4)))
    yield "volume", _Volume, (torch.randn(2, 4, 16), torch.randn(1, 2, 6, 6, 6))


def models() -> Iterator[tuple[str, Callable[[], nn.Module], tuple[Any, ...], dict[str, Any]]]:
    """Yield name, constructor, arguments and keyword arguments of every model."""
    torch.manual_seed(0)
    for name, construct, arguments in _own():
        yield name, construct, arguments, {}
    tokens = _tokens()
    for kind in _TEXT.split():
        given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        yield kind, lambda kind=kind: _transformer(kind), (), given
    for kind in _PAIRS.split():
        given = {"input_ids": tokens, "decoder_input_ids": tokens}
        yield kind, lambda kind=kind: _transformer(kind), (), given
    for kind in _VISION.split():
        size = int(getattr(_shrunk(kind), "image_size", 64) or 64)
        yield kind, lambda kind=kind: _transformer(kind), (), {"pixel_values": _image(3, size)}
    for kind in _SPEECH.split():
        yield kind, lambda kind=kind: _transformer(kind), (), {"input_values": torch.randn(1, 4000)}
