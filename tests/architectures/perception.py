"""Models of images and of sound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.architectures.table import VOCABULARY, Architecture, Inputs, ids, pixels

_VIT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
_SWIN: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "hidden_dropout_prob": 0.1,
}
_WAVE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
    "layerdrop": 0.0,
    # SpecAugment draws its masks with NumPy, which capture cannot record.
    "apply_spec_augment": False,
}


def _wave() -> Inputs:
    return {"input_values": torch.randn(2, 800)}


def _vision(
    model: str, config: str, settings: dict[str, Any], inputs: Callable[[], Inputs] | None = None
) -> Architecture:
    return Architecture("vision", model, config, settings, inputs or pixels())


def _speech(
    model: str, config: str, settings: dict[str, Any], inputs: Callable[[], Inputs] = _wave
) -> Architecture:
    return Architecture("speech", model, config, settings, inputs)


TABLE = {
    "vit": _vision("ViTForImageClassification", "ViTConfig", _VIT),
    "deit": _vision("DeiTModel", "DeiTConfig", _VIT),
    "beit": _vision(
        "BeitModel",
        "BeitConfig",
        {**_VIT, "use_relative_position_bias": True, "drop_path_rate": 0.1, "vocab_size": 99},
    ),
    "dinov2": _vision("Dinov2Model", "Dinov2Config", {**_VIT, "drop_path_rate": 0.1}),
    "swin": _vision(
        "SwinModel",
        "SwinConfig",
        {**_SWIN, "drop_path_rate": 0.1},
    ),
    "swinv2": _vision(
        "Swinv2Model",
        "Swinv2Config",
        {**_SWIN, "drop_path_rate": 0.0},
    ),
    "convnext": _vision(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "drop_path_rate": 0.1},
        pixels(64),
    ),
    "resnet": _vision(
        "ResNetForImageClassification",
        "ResNetConfig",
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 16, 16, 16],
            "depths": [1, 1, 1, 1],
            "layer_type": "basic",
        },
        pixels(64),
    ),
    "mobilenet-v2": _vision(
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        {"image_size": 32, "depth_multiplier": 0.25, "classifier_dropout_prob": 0.2},
    ),
    "mobilenet-v1": _vision(
        "MobileNetV1Model", "MobileNetV1Config", {"image_size": 32, "depth_multiplier": 0.25}
    ),
    "efficientnet": _vision(
        "EfficientNetModel",
        "EfficientNetConfig",
        {
            "image_size": 32,
            "width_coefficient": 0.25,
            "depth_coefficient": 0.25,
            "hidden_dim": 320,
            "kernel_sizes": [3, 3],
            "in_channels": [8, 16],
            "out_channels": [16, 8],
            "strides": [1, 2],
            "num_block_repeats": [1, 1],
            "expand_ratios": [1, 6],
            "depthwise_padding": [],
        },
    ),
    "regnet": _vision(
        "RegNetModel",
        "RegNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8},
    ),
    "segformer": _vision(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [4, 2],
            "hidden_sizes": [16, 32],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 32,
            "hidden_dropout_prob": 0.1,
        },
    ),
    "poolformer": _vision(
        "PoolFormerModel",
        "PoolFormerConfig",
        {
            "hidden_sizes": [16, 16, 16, 16],
            "depths": [1, 1, 1, 1],
            "drop_path_rate": 0.1,
        },
        pixels(64),
    ),
    "mobilevit": _vision(
        "MobileViTModel",
        "MobileViTConfig",
        {
            "image_size": 32,
            "hidden_sizes": [16, 16, 16],
            "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32],
            "num_attention_heads": 2,
        },
    ),
    "vit-mae": _vision(
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        {
            **_VIT,
            "decoder_hidden_size": 32,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 4,
            "decoder_intermediate_size": 64,
        },
    ),
    "cvt": _vision(
        "CvtModel",
        "CvtConfig",
        {"embed_dim": [8, 16, 16], "num_heads": [1, 2, 2], "depth": [1, 2, 3]},
        pixels(32),
    ),
    "wav2vec2": _speech("Wav2Vec2Model", "Wav2Vec2Config", _WAVE),
    "hubert": _speech("HubertModel", "HubertConfig", _WAVE),
    "wavlm": _speech("WavLMModel", "WavLMConfig", {**_WAVE, "num_buckets": 16}),
    "whisper": _speech(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": VOCABULARY,
            "num_mel_bins": 8,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_source_positions": 20,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "dropout": 0.1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        lambda: {"input_features": torch.randn(2, 8, 40), "labels": ids(6)},
    ),
    "speecht5": _speech(
        "SpeechT5ForTextToSpeech",
        "SpeechT5Config",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
            "num_mel_bins": 8,
            "speech_decoder_prenet_units": 16,
            "speech_decoder_postnet_units": 16,
            "speech_decoder_postnet_layers": 2,
            "speaker_embedding_dim": 8,
            "reduction_factor": 1,
        },
        lambda: {
            "input_ids": ids(8),
            "decoder_input_values": torch.randn(2, 6, 8),
            "speaker_embeddings": torch.randn(2, 8),
        },
    ),
    "ast": _speech(
        "ASTModel",
        "ASTConfig",
        {
            **{k: v for k, v in _VIT.items() if k != "image_size"},
            "max_length": 24,
            "num_mel_bins": 16,
            "frequency_stride": 8,
            "time_stride": 8,
        },
        lambda: {"input_values": torch.randn(2, 24, 16)},
    ),
}
