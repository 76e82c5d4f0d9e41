"""Architectures of no other family: two towers, time series, latent arrays."""

from __future__ import annotations

from typing import Any

import torch

from tests.architectures.table import VOCABULARY, Architecture, Inputs, ids, mask, pixels

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 16,
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 98,
    "pad_token_id": 1,
}
_IMAGE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "attention_dropout": 0.1,
}


def _text_and_image() -> Inputs:
    return {**pixels()(), "input_ids": ids(), "attention_mask": mask()}


def _series() -> Inputs:
    return {
        "past_values": torch.randn(2, 10),
        "past_time_features": torch.randn(2, 10, 2),
        "past_observed_mask": torch.ones(2, 10),
        "future_values": torch.randn(2, 4),
        "future_time_features": torch.randn(2, 4, 2),
    }


TABLE = {
    "clip": Architecture(
        "other",
        "CLIPModel",
        "CLIPConfig",
        {"text_config": _TEXT, "vision_config": _IMAGE, "projection_dim": 16},
        lambda: {**_text_and_image(), "return_loss": True},
    ),
    "siglip": Architecture(
        "other",
        "SiglipModel",
        "SiglipConfig",
        {"text_config": _TEXT, "vision_config": _IMAGE},
        _text_and_image,
    ),
    "blip": Architecture(
        "other",
        "BlipModel",
        "BlipConfig",
        {"text_config": _TEXT, "vision_config": _IMAGE, "projection_dim": 16},
        _text_and_image,
    ),
    "vilt": Architecture(
        "other",
        "ViltModel",
        "ViltConfig",
        {**_TEXT, "image_size": 32, "patch_size": 8, "max_image_length": -1},
        _text_and_image,
        # Forward resizes position embeddings to sizes that it computes from the image mask.
        refused="data-dependent",
    ),
    "time-series": Architecture(
        "other",
        "TimeSeriesTransformerForPrediction",
        "TimeSeriesTransformerConfig",
        {
            "prediction_length": 4,
            "context_length": 8,
            "lags_sequence": [1, 2],
            "num_time_features": 2,
            "d_model": 16,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
        },
        _series,
    ),
    "patchtst": Architecture(
        "other",
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        {
            "num_input_channels": 3,
            "context_length": 16,
            "patch_length": 4,
            "patch_stride": 4,
            "num_hidden_layers": 1,
            "d_model": 16,
            "num_attention_heads": 4,
            "ffn_dim": 32,
            "prediction_length": 4,
            "attention_dropout": 0.1,
            "ff_dropout": 0.1,
        },
        lambda: {"past_values": torch.randn(2, 16, 3)},
    ),
    "perceiver": Architecture(
        "other",
        "PerceiverModel",
        "PerceiverConfig",
        {
            "num_latents": 8,
            "d_latents": 32,
            "d_model": 24,
            "num_blocks": 1,
            "num_self_attends_per_block": 1,
            "num_self_attention_heads": 4,
            "num_cross_attention_heads": 4,
        },
        lambda: {"inputs": torch.randn(2, 10, 24)},
    ),
    "decision": Architecture(
        "other",
        "DecisionTransformerModel",
        "DecisionTransformerConfig",
        {
            "state_dim": 5,
            "act_dim": 2,
            "hidden_size": 32,
            "max_ep_len": 20,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
        },
        lambda: {
            "states": torch.randn(2, 6, 5),
            "actions": torch.randn(2, 6, 2),
            "rewards": torch.randn(2, 6, 1),
            "returns_to_go": torch.randn(2, 6, 1),
            "timesteps": torch.arange(6).repeat(2, 1),
            "attention_mask": torch.ones(2, 6, dtype=torch.int64),
        },
    ),
}
