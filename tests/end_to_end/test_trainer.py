"""HuggingFace's Trainer, as in its documentation, with one line added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from tvmbridge import DispatchReport, add_tvm_dispatch, dispatch_report

pytest.importorskip("accelerate", reason="Trainer needs it")

pytestmark = pytest.mark.slow

LENGTH, LABELS = 16, 3


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Random sentences, padded to one length."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(1, 100, (count, LENGTH), generator=generator)
        self.lengths = torch.randint(4, LENGTH + 1, (count,), generator=generator)
        self.labels = torch.randint(0, LABELS, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        mask = (torch.arange(LENGTH) < self.lengths[index]).long()
        ids, labels = self.ids[index] * mask, self.labels[index]
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def trained(folder: Path, dispatch: bool, **arguments: Any) -> tuple[list[float], Any]:
    """Fine-tune; return the losses of training and evaluation, and the model."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        Trainer,
        TrainingArguments,
    )

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        num_labels=LABELS,
    )
    model = BertForSequenceClassification(config)
    if dispatch:
        add_tvm_dispatch(model)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=2,
            eval_strategy="epoch",
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=Sentences(96, seed=1),
        eval_dataset=Sentences(32, seed=2),
    )
    trainer.train()
    trainer.evaluate()
    history = trainer.state.log_history
    return [e[key] for e in history for key in ("loss", "eval_loss") if key in e], model


@pytest.mark.parametrize("accumulated", [1, 2])
def test_fine_tuning_and_evaluation_are_served(tmp_path: Path, accumulated: int) -> None:
    expected, _ = trained(tmp_path, False, gradient_accumulation_steps=accumulated)
    losses, model = trained(tmp_path, True, gradient_accumulation_steps=accumulated)
    assert len(losses) == 24 // accumulated + 3
    assert losses == pytest.approx(expected, rel=1e-5)
    report: DispatchReport = dispatch_report(model)
    assert report.share >= 0.9, str(report)
    assert report.tvm_calls + sum(report.fallbacks.values()) == 24 + 3 * 4
