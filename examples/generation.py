"""transformers' generate: a small GPT-2 or Llama continues prompts with a static cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tvmbridge import DispatchReport, add_tvm_dispatch, dispatch_report

TOKENS, BATCH, PROMPT, NEW = 100, 2, 8, 24


def language_model(name: str) -> Any:
    if name == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=TOKENS,
                n_positions=64,
                n_embd=32,
                n_layer=2,
                n_head=4,
                bos_token_id=0,
                eos_token_id=None,
            )
        )
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TOKENS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            bos_token_id=0,
            eos_token_id=None,
        )
    )


def main(dispatch: bool = True, name: str = "llama") -> tuple[list[float], DispatchReport | None]:
    """Return the largest score of each step, the generated tokens, and the dispatch report."""
    torch.manual_seed(0)
    model = language_model(name).eval()
    if dispatch:
        add_tvm_dispatch(model)
    prompt = torch.randint(1, TOKENS, (BATCH, PROMPT))
    written = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW,
        do_sample=False,
        cache_implementation="static",
        output_scores=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    scores = torch.stack(written.scores).amax(-1)
    found = [*scores.flatten().tolist(), *written.sequences.flatten().tolist()]
    return found, dispatch_report(model) if dispatch else None


if __name__ == "__main__":
    print(main()[1])
