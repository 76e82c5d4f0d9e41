"""Text decoders, some with mixtures of experts."""

from __future__ import annotations

from typing import Any

from tests.architectures.table import VOCABULARY, Architecture, labelled

_LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.1,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_positions": 40,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# One of the library's implementations loops over the experts that tokens chose; this one does not.
_EXPERTS = {**_LLAMA, "experts_implementation": "batched_mm", "output_router_logits": True}


def _decoder(name: str, **settings: Any) -> Architecture:
    return Architecture(
        "decoder", f"{name}ForCausalLM", f"{name}Config", {**_LLAMA, **settings}, labelled, True
    )


def _experts(name: str, **settings: Any) -> Architecture:
    return Architecture(
        "experts",
        f"{name}ForCausalLM",
        f"{name}Config",
        {**_EXPERTS, **settings},
        labelled,
        cached=True,
    )


def _gpt(model: str, config: str, **settings: Any) -> Architecture:
    return Architecture("decoder", model, config, {**_GPT2, **settings}, labelled, True)


TABLE = {
    "gpt2": _gpt("GPT2LMHeadModel", "GPT2Config"),
    "gpt-neo": Architecture(
        "decoder",
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 40,
            "window_size": 4,
            "embed_dropout": 0.1,
            "attention_dropout": 0.1,
        },
        labelled,
        True,
    ),
    "gpt-neox": _decoder("GPTNeoX", hidden_dropout=0.1),
    "gptj": _gpt("GPTJForCausalLM", "GPTJConfig", rotary_dim=4, resid_pdrop=0.1, embd_pdrop=0.1),
    "codegen": _gpt("CodeGenForCausalLM", "CodeGenConfig", rotary_dim=4, n_ctx=40, n_head=4),
    "opt": _decoder("OPT", ffn_dim=64, word_embed_proj_dim=32, dropout=0.1, layerdrop=0.0),
    "bloom": Architecture(
        "decoder",
        "BloomForCausalLM",
        "BloomConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "n_layer": 1,
            "n_head": 4,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
        },
        labelled,
        True,
    ),
    "llama": _decoder("Llama"),
    "mistral": _decoder("Mistral", sliding_window=6),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3", head_dim=8),
    "gemma": _decoder("Gemma", head_dim=8),
    "gemma2": _decoder("Gemma2", num_hidden_layers=2, head_dim=8, sliding_window=6),
    "gemma3": Architecture(
        "decoder",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **_LLAMA,
            "num_hidden_layers": 2,
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        labelled,
        True,
    ),
    "phi": _decoder("Phi", resid_pdrop=0.1, embd_pdrop=0.1),
    "phi3": _decoder("Phi3", resid_pdrop=0.1),
    "falcon": _decoder("Falcon", hidden_dropout=0.1, attention_dropout=0.1, alibi=False),
    "stablelm": _decoder("StableLm", hidden_dropout=0.1),
    "olmo": _decoder("Olmo"),
    "olmo2": _decoder("Olmo2"),
    "starcoder2": _decoder("Starcoder2", residual_dropout=0.1, embedding_dropout=0.1),
    "cohere": _decoder("Cohere"),
    "granite": _decoder("Granite"),
    "mamba": Architecture(
        "decoder",
        "MambaForCausalLM",
        "MambaConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "state_size": 4,
            "num_hidden_layers": 1,
            "expand": 2,
            "conv_kernel": 4,
            "time_step_rank": 4,
        },
        labelled,
    ),
    "mixtral": _experts(
        "Mixtral",
        # The library's default implementation, a custom operator. Before 5.23 its derivative was no
        # operator, but a loop over experts.
        experts_implementation="grouped_mm",
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "qwen2-moe": _experts(
        "Qwen2Moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=32,
    ),
    "qwen3-moe": _experts(
        "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
    ),
    "olmoe": _experts("Olmoe", num_experts=4, num_experts_per_tok=2),
    "deepseek-v3": Architecture(
        "experts",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **_LLAMA,
            "num_hidden_layers": 2,
            "experts_implementation": "batched_mm",
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
        labelled,
        True,
    ),
}
