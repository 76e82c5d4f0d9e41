"""PEFT: train a LoRA adapter on a small Llama, disable it, add a second one, and merge that."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from tvmbridge import DispatchReport, add_tvm_dispatch, dispatch_report

VOCABULARY, LENGTH, BATCH, STEPS = 64, 12, 4, 30


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            use_cache=False,
        )
    )


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def train(model: Any, steps: int) -> list[float]:
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=0.1)
    g = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=g)
        loss = model.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def evaluate(model: Any, calls: int = 15) -> list[float]:
    g = torch.Generator().manual_seed(2)
    losses = []
    with torch.no_grad():
        for _ in range(calls):
            ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=g)
            losses.append(model.eval()(input_ids=ids, labels=ids).loss.item())
    return losses


def main(dispatch: bool = True) -> tuple[list[float], DispatchReport | None]:
    """Return the losses in each state of the adapters, and the dispatch report."""
    torch.manual_seed(0)
    model: Any = get_peft_model(llama(), lora())
    if dispatch:
        add_tvm_dispatch(model)
    losses = train(model, STEPS) + evaluate(model)
    with model.disable_adapter():
        losses += evaluate(model)
    model.add_adapter("second", lora())
    model.set_adapter("second")
    losses += train(model, STEPS)
    model.merge_adapter()
    losses += evaluate(model)
    model.unmerge_adapter()
    return losses, dispatch_report(model) if dispatch else None


if __name__ == "__main__":
    print(main()[1])
