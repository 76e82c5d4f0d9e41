"""HuggingFace's Trainer: train a small BERT to classify, and evaluate it after each epoch."""

from __future__ import annotations

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from examples.doors import Report, opened, served

LENGTH, LABELS, EPOCHS = 16, 3, 3


def classifier() -> BertForSequenceClassification:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=100,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=LENGTH,
            num_labels=LABELS,
        )
    )


def data(rows: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return random sentences, padded to one length."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 100, (rows, LENGTH), generator=g)
    mask = torch.arange(LENGTH) < torch.randint(4, LENGTH + 1, (rows, 1), generator=g)
    labels = torch.randint(0, LABELS, (rows,), generator=g)
    return [
        {"input_ids": i * m, "attention_mask": m.long(), "labels": label}
        for i, m, label in zip(ids, mask, labels, strict=True)
    ]


def main(
    dispatch: bool = True, door: str = "dispatch", epochs: int = EPOCHS
) -> tuple[list[float], Report | None]:
    """Return the losses of training and evaluation, and the report of the served calls."""
    torch.manual_seed(0)
    model = classifier()
    if dispatch:
        model = opened(model, door)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            eval_strategy="epoch",
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=data(96, seed=1),
            eval_dataset=data(32, seed=2),
        )
        trainer.train()
    history = trainer.state.log_history
    losses = [e[key] for e in history for key in ("loss", "eval_loss") if key in e]
    return losses, served(model, door) if dispatch else None


if __name__ == "__main__":
    print(main()[1])
