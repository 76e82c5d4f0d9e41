"""Fine-tune by HuggingFace's Trainer: dynamic padding, evaluation, checkpoints, a resumed run."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from tvmbridge import DispatchReport, add_tvm_dispatch, dispatch_report

SENTENCES, LONGEST, LABELS, STEPS = 500, 32, 3, 48


def classifier() -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=200,
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=512,
            num_labels=LABELS,
        )
    )


def sentences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, LONGEST + 1, (count,), generator=g).tolist()
    return [
        {
            "input_ids": torch.randint(1, 200, (length,), generator=g),
            "labels": torch.randint(0, LABELS, (), generator=g),
        }
        for length in lengths
    ]


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad sentences to the longest of the batch, as DataCollatorWithPadding does."""
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = torch.stack([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def trainer(model: BertForSequenceClassification, folder: str) -> Trainer:
    return Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            eval_strategy="steps",
            eval_steps=STEPS // 2,
            save_strategy="steps",
            save_steps=STEPS // 2,
            logging_steps=1,
            per_device_train_batch_size=16,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=sentences(SENTENCES, seed=1),
        eval_dataset=sentences(60, seed=2),
        data_collator=padded,
    )


def main(dispatch: bool = True) -> tuple[list[float], DispatchReport | None]:
    """Return the losses of training, evaluations and the resumed run, and the dispatch report."""
    losses: list[float] = []
    model = classifier()
    if dispatch:
        add_tvm_dispatch(model, dynamic_shapes="auto")
    with tempfile.TemporaryDirectory() as folder:
        for resumed in (None, str(Path(folder, f"checkpoint-{STEPS // 2}"))):
            running = trainer(model, folder)
            running.train(resume_from_checkpoint=resumed)
            history = running.state.log_history
            losses += [e[key] for e in history for key in ("loss", "eval_loss") if key in e]
    return losses, dispatch_report(model) if dispatch else None


if __name__ == "__main__":
    print(main()[1])
