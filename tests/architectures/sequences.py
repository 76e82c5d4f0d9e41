"""Encoder-decoders of text."""

from __future__ import annotations

from typing import Any

from tests.architectures.table import VOCABULARY, Architecture, pair

_BART: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 1,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "decoder_start_token_id": 0,
}


def _bart(model: str, config: str, refused: str = "", **settings: Any) -> Architecture:
    family = "encoder-decoder"
    return Architecture(family, model, config, {**_BART, **settings}, pair, refused=refused)


def _t5(model: str, config: str, refused: str = "", **settings: Any) -> Architecture:
    family = "experts" if "num_experts" in settings else "encoder-decoder"
    return Architecture(family, model, config, {**_T5, **settings}, pair, refused=refused)


TABLE = {
    "t5": _t5("T5ForConditionalGeneration", "T5Config"),
    "mt5": _t5("MT5ForConditionalGeneration", "MT5Config", feed_forward_proj="gated-gelu"),
    "longt5": _t5("LongT5ForConditionalGeneration", "LongT5Config", local_radius=4),
    "switch": _t5(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        # Forward calls only the experts that tokens chose.
        "data-dependent",
        num_layers=2,
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        expert_capacity=8,
    ),
    "bart": _bart("BartForConditionalGeneration", "BartConfig"),
    "mbart": _bart("MBartForConditionalGeneration", "MBartConfig"),
    "pegasus": _bart("PegasusForConditionalGeneration", "PegasusConfig"),
    "marian": _bart("MarianMTModel", "MarianConfig", decoder_vocab_size=VOCABULARY),
    "m2m100": _bart("M2M100ForConditionalGeneration", "M2M100Config"),
    "blenderbot": _bart("BlenderbotForConditionalGeneration", "BlenderbotConfig"),
    "led": _bart(
        "LEDForConditionalGeneration",
        "LEDConfig",
        # Forward branches on whether any token attends globally.
        "data-dependent",
        attention_window=4,
        max_encoder_position_embeddings=40,
        max_decoder_position_embeddings=40,
    ),
    "prophetnet": Architecture(
        "encoder-decoder",
        "ProphetNetForConditionalGeneration",
        "ProphetNetConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_encoder_layers": 1,
            "num_decoder_layers": 1,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_position_embeddings": 40,
            "decoder_start_token_id": 0,
        },
        pair,
    ),
}
