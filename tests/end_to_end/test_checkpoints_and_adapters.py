"""Scripts with transformers against eager: a checkpoint between steps, and PEFT's adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tvmbridge import add_tvm_dispatch, dispatch_report

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_SIZES = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
_IDS = torch.randint(5, 60, (2, 8), generator=torch.Generator().manual_seed(1))


def _bert() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**_SIZES, **off, num_attention_heads=2)
    return transformers.BertForSequenceClassification(config)


def _llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**_SIZES, num_attention_heads=2, use_cache=False)
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(autouse=True, scope="module")
def _libraries_imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Save a model once, because the imports that saving causes add warning filters."""
    _bert().save_pretrained(tmp_path_factory.mktemp("imported"))


def _trained(model: Any, labels: torch.Tensor, steps: int) -> list[torch.Tensor]:
    losses = []
    for _ in range(steps):
        loss = model(input_ids=_IDS, labels=labels).loss
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.05)
                p.grad = None
        losses.append(loss.detach())
    return losses


def test_a_checkpoint_does_not_end_service(tmp_path: Path) -> None:
    models, labels = (_bert(), _bert()), torch.tensor([0, 1])
    add_tvm_dispatch(models[0])
    for number in range(2):
        ours, theirs = (_trained(m.train(), labels, 5) for m in models)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        models[0].save_pretrained(tmp_path / str(number))
    report = dispatch_report(models[0])
    # Eager PyTorch serves the first call, which has labels for the first time.
    assert (report.tvm_calls, sum(report.fallbacks.values())) == (9, 1)


@contextmanager
def _without_adapters(models: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(model.disable_adapter())
        yield


@pytest.mark.parametrize(
    ("make", "targets", "task"),
    [(_bert, ["query"], "SEQ_CLS"), (_llama, ["q_proj"], "CAUSAL_LM")],
)
def test_adapters_are_trained_switched_and_merged(
    make: Callable[[], Any], targets: list[str], task: str
) -> None:
    peft = pytest.importorskip("peft")
    labels = torch.tensor([0, 1]) if task == "SEQ_CLS" else _IDS
    config = peft.LoraConfig(r=2, target_modules=targets, task_type=task)
    models = [peft.get_peft_model(make(), config) for _ in range(2)]
    add_tvm_dispatch(models[0])

    def compare(calls: int = 8) -> None:
        for _ in range(calls):
            with torch.no_grad():
                ours, theirs = (m.eval()(input_ids=_IDS).logits for m in models)
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)

    def train(steps: int = 8) -> None:
        ours, theirs = (_trained(m.train(), labels, steps) for m in models)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)

    train()
    compare()
    for _ in range(2):
        with _without_adapters(models):
            compare()
        compare()
    for model in models:
        torch.manual_seed(2)
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules=targets, task_type=task))
        model.set_adapter("second")
    train()
    for model in models:
        model.merge_adapter()
    compare()
    for model in models:
        model.unmerge_adapter()
        model.set_adapter("default")
    compare()
    assert dispatch_report(models[0]).share > 0.95
