"""The models of the suites, built from configurations with random weights, and their inputs."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

SUITES = ("huggingface", "timm")
_FOLDER = Path(__file__).parent
# The dropout rate of PyTorch's harness: random numbers are drawn, but nothing is dropped.
_NO_DROPOUT = 1e-30
# Values for --scale tiny, set for each name that a configuration has.
_TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "dim", "n_embd", "embedding_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "d_ff", "d_inner"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"), 128),
    **dict.fromkeys(("d_kv", "d_head", "head_dim", "true_hidden_size"), 16),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_local_experts", "num_experts"), 4),
    "moe_intermediate_size": 64,
    "vocab_size": 512,
}
# Values that differ from the default configuration, by model: published sizes, and tiny ones.
_SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DistillGPT2": ({"n_layer": 6}, {}),
    "AllenaiLongformerBase": (
        {"max_position_embeddings": 4098, "pad_token_id": 1},
        {"attention_window": [8, 8]},
    ),
    "MobileBertForMaskedLM": ({}, {"intra_bottleneck_size": 64, "true_hidden_size": 64}),
    "MobileBertForQuestionAnswering": ({}, {"intra_bottleneck_size": 64, "true_hidden_size": 64}),
    **dict.fromkeys(("GPTJForCausalLM", "GPTJForQuestionAnswering"), ({}, {"rotary_dim": 16})),
    **dict.fromkeys(
        ("GPTNeoForCausalLM", "GPTNeoForSequenceClassification"),
        ({}, {"attention_types": [[["global", "local"], 1]]}),
    ),
    # Positions begin after that of padding, 1.
    **dict.fromkeys(
        ("RobertaForCausalLM", "RobertaForQuestionAnswering"),
        ({"max_position_embeddings": 514}, {}),
    ),
    "GPT2ForSequenceClassification": ({"pad_token_id": 0}, {"pad_token_id": 0}),
    "meta-llama/Llama-3.2-1B": (
        {
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "intermediate_size": 8192,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
        },
        {},
    ),
    "openai/whisper-tiny": (
        {"encoder_layers": 4, "decoder_layers": 4},
        {"max_source_positions": 32, "num_mel_bins": 16},
    ),
    "Qwen/Qwen3-0.6B": (
        {
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "intermediate_size": 3072,
            "tie_word_embeddings": True,
        },
        {},
    ),
    "Mixtral": (
        {
            "hidden_size": 512,
            "num_hidden_layers": 4,
            "intermediate_size": 1024,
            "num_attention_heads": 8,
        },
        {},
    ),
    "Qwen3Moe": ({"hidden_size": 512, "num_hidden_layers": 4, "num_experts": 16}, {}),
}
_TOLERANCES = {
    ("MT5ForConditionalGeneration", True): 2e-2,
    ("BertForMaskedLM", True): 2e-2,
    ("GPT2ForSequenceClassification", False): 5e-3,
}


@dataclass(frozen=True)
class Entry:
    """A model of a suite.

    - ``kind``: a class of transformers, or timm's name of the model.
    - ``batch``, ``cpu_batch``: PyTorch's batch sizes on a GPU and a CPU; 0: not run on a CPU.
    - ``status``: whether PyTorch's dashboard runs the model today; ``"ci"`` if so.
    - ``tokens``: the length of a text; 0 for images.
    - ``tolerance``: the tolerance in training.
    """

    suite: str
    name: str
    kind: str
    batch: int
    cpu_batch: int
    status: str
    tokens: int = 0
    tolerance: float = 1e-2

    def bound(self, training: bool) -> float:
        """Return the tolerance of the accuracy rule."""
        usual = self.tolerance if training else 1e-3
        return _TOLERANCES.get((self.name, training), usual)


def entries(suite: str) -> dict[str, Entry]:
    """Return the models of a suite by name."""
    lines = (_FOLDER / f"{suite}.tsv").read_text(encoding="utf-8").splitlines()
    found = {}
    for row in csv.reader((x for x in lines if not x.startswith("#")), delimiter="\t"):
        if suite == "timm":
            name, batch, on_cpu, tolerance, status = row
            found[name] = Entry(
                suite, name, name, int(batch), int(on_cpu), status, 0, float(tolerance)
            )
        else:
            name, kind, batch, on_cpu, tokens, status = row
            found[name] = Entry(suite, name, kind, int(batch), int(on_cpu), status, int(tokens))
    return found


class Scalar(nn.Module):
    """An image model that returns the loss of PyTorch's harness: the mean of the output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        output = self.inner(x)
        outputs = output if isinstance(output, tuple | list) else [output]
        return sum(o.sum() / o.numel() for o in outputs) / len(outputs)


def make(entry: Entry, training: bool, scale: str, batch: int) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model and the keyword arguments of a call, on the CPU; the same each time."""
    torch.manual_seed(1337)
    if entry.suite == "timm":
        return _of_timm(entry, training, scale, batch)
    import transformers

    config = _configuration(entry, scale)
    model = getattr(transformers, entry.kind)(config).train(training)
    tokens = min(entry.tokens, 32) if scale == "tiny" else entry.tokens
    return model, _texts(model, batch, tokens, training)


def _of_timm(
    entry: Entry, training: bool, scale: str, batch: int
) -> tuple[nn.Module, dict[str, Any]]:
    import timm

    model = timm.create_model(entry.kind, pretrained=False, drop_rate=0.0).train(training)
    size: tuple[int, ...] = timm.data.resolve_data_config({}, model=model)["input_size"]
    x = torch.randint(256, (batch, *size)).float()
    x = (x - x.mean()) / x.std()
    if training:
        return Scalar(model), {"x": x}
    return model, {"x": x}


def _configuration(entry: Entry, scale: str) -> Any:
    import transformers

    kind = getattr(transformers, entry.kind).config_class
    full, tiny = _SIZES.get(entry.name, ({}, {}))
    sizes = dict(full)
    if scale == "tiny":
        known = kind().to_dict()
        sizes = {**full, **{k: v for k, v in _TINY.items() if known.get(k) is not None}, **tiny}
    config = kind(**sizes)
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            # With a nonzero rate a random draw would choose the layers that run.
            setattr(config, name, 0.0 if "layerdrop" in name else _NO_DROPOUT)
    config.use_cache = False
    if getattr(config, "pad_token_id", None) is not None:
        config.pad_token_id = min(config.pad_token_id, config.vocab_size - 1)
    return config


def _texts(model: Any, batch: int, tokens: int, training: bool) -> dict[str, Any]:
    """Return random token ids with labels, as PyTorch's harness draws them."""
    vocabulary, kind = model.config.vocab_size, type(model).__name__

    def words() -> torch.Tensor:
        return torch.randint(2, vocabulary, (batch, tokens))

    given: dict[str, Any] = {"input_ids": words()}
    if kind.startswith("Whisper"):
        frames = 2 * model.config.max_source_positions
        given = {"input_features": torch.randn(batch, model.config.num_mel_bins, frames)}
    if kind.endswith("QuestionAnswering"):
        given |= {f"{x}_positions": torch.randint(tokens, (batch,)) for x in ("start", "end")}
    elif kind.endswith("SequenceClassification"):
        given["labels"] = torch.randint(model.config.num_labels, (batch,))
    elif training or "ConditionalGeneration" in kind:
        given["labels"] = words()
    if "ConditionalGeneration" in kind:
        given["decoder_input_ids"] = words()
    return given


def moved(given: Mapping[str, Any], device: str, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the arguments on a device, with floating-point tensors in ``dtype``."""
    return {
        name: x.to(device, dtype if x.is_floating_point() else None) for name, x in given.items()
    }
