"""Scripts with transformers, PEFT, accelerate and Lightning."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.scripts.script import Door, script
from tests.scripts.training import stepped

_SIZES = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
_PLAIN = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _bert() -> Any:
    import transformers

    config = transformers.BertConfig(**_SIZES, **_PLAIN, num_attention_heads=2, num_labels=3)
    return transformers.BertForSequenceClassification(config)


def _llama(**more: Any) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        **_SIZES, num_attention_heads=2, use_cache=False, pad_token_id=0, **more
    )
    return transformers.LlamaForCausalLM(config)


def _t5() -> Any:
    import transformers

    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=60,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
            dropout_rate=0.0,
        )
    )


def _rows(count: int) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 14, (count,), generator=g).tolist()
    return [
        {
            "input_ids": torch.randint(5, 60, (n,), generator=g),
            "labels": torch.randint(0, 3, (), generator=g),
        }
        for n in lengths
    ]


def _padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = torch.stack([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def _causal(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = _padded(rows)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def _trainer(model: Any, folder: str, collate: Any, **more: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = {
        "output_dir": folder,
        "max_steps": 24,
        "eval_strategy": "steps",
        "eval_steps": 8,
        "save_strategy": "steps",
        "save_steps": 8,
        "logging_steps": 1,
        "report_to": "none",
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "disable_tqdm": True,
        **more,
    }
    return Trainer(
        model=model,
        args=TrainingArguments(**arguments),
        train_dataset=_rows(50),
        eval_dataset=_rows(10),
        data_collator=collate,
    )


def _history(trainer: Any) -> list[float]:
    return [e[k] for e in trainer.state.log_history for k in ("loss", "eval_loss") if k in e]


def _trained(model: Any, collate: Any, resume: bool = False, **more: Any) -> Iterator[list[Any]]:
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(model, folder, collate, **more)
        trainer.train()
        yield from ([loss] for loss in _history(trainer))
        if resume:
            again = _trainer(model, folder, collate, **more)
            again.train(resume_from_checkpoint=f"{folder}/checkpoint-16")
            yield from ([loss] for loss in _history(again))


@script("transformers", "accelerate")
def trainer_bert(door: Door) -> Iterator[list[Any]]:
    model = door(_bert(), dynamic_shapes="auto")
    yield from _trained(model, _padded, resume=True, gradient_accumulation_steps=2)


@script("transformers", "accelerate")
def trainer_no_options(door: Door) -> Iterator[list[Any]]:
    yield from _trained(door(_bert()), _padded, label_smoothing_factor=0.1)


@script("transformers", "accelerate")
def trainer_checkpointing(door: Door) -> Iterator[list[Any]]:
    yield from _trained(door(_llama(), dynamic_shapes="auto"), _causal, gradient_checkpointing=True)


@script("transformers", "accelerate", bound=2e-2)
def trainer_bf16(door: Door) -> Iterator[list[Any]]:
    yield from _trained(door(_llama(), dynamic_shapes="auto"), _causal, bf16=True)


@script("transformers", "accelerate")
def trainer_stops_early(door: Door) -> Iterator[list[Any]]:
    from transformers import EarlyStoppingCallback

    model = door(_bert(), dynamic_shapes="auto")
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(
            model, folder, _padded, load_best_model_at_end=True, metric_for_best_model="loss"
        )
        trainer.add_callback(EarlyStoppingCallback(1))
        trainer.train()
        yield from ([loss] for loss in _history(trainer))
        yield [torch.as_tensor(trainer.predict(_rows(9)).predictions)]


def _steps(model: Any, batch: Any, count: int, lr: float = 0.05) -> Iterator[list[Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=lr)
    for i in range(count):
        loss = model(**batch(i)).loss
        yield [stepped(optimizer, loss), *(p.detach() for p in trained[:2])]


def _fixed(i: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(i)
    ids = torch.randint(5, 60, (2, 8), generator=g)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _classes(i: int) -> dict[str, Tensor]:
    return {**_fixed(i), "labels": torch.tensor([i % 3, (i + 1) % 3])}


def _adapters(door: Door, base: Any, batch: Any, targets: list[str], **more: Any) -> Iterator[Any]:
    """Train two adapters, switch, disable one, and merge it."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(base, LoraConfig(r=4, target_modules=targets, lora_dropout=0.1, **more))
    door(model)
    yield from _steps(model, batch, 8)
    model.add_adapter("second", LoraConfig(r=2, target_modules=targets[:1], **more))
    model.set_adapter("second")
    yield from _steps(model, batch, 8)
    model.set_adapter("default")
    yield from _steps(model, batch, 6)
    model.eval()
    with torch.no_grad():
        for i in range(5):
            yield [model(**batch(i)).loss]
        with model.disable_adapter():
            for i in range(5):
                yield [model(**batch(i)).loss]
        for i in range(5):
            yield [model(**batch(i)).loss]
        merged = model.merge_and_unload()
        yield [merged(**batch(0)).loss]


@script("peft", "transformers")
def lora_llama(door: Door) -> Iterator[list[Any]]:
    yield from _adapters(door, _llama(), _fixed, ["q_proj", "v_proj"])


@script("peft", "transformers")
def lora_bert(door: Door) -> Iterator[list[Any]]:
    """The classifier, which each adapter trains a copy of, is one of the modules to save."""
    yield from _adapters(door, _bert(), _classes, ["query", "value"], task_type="SEQ_CLS")


@script("peft", "transformers")
def ia3_bert(door: Door) -> Iterator[list[Any]]:
    from peft import IA3Config, get_peft_model

    config = IA3Config(
        task_type="SEQ_CLS",
        target_modules=["key", "value", "output.dense"],
        feedforward_modules=["output.dense"],
    )
    model = get_peft_model(_bert(), config)
    door(model)
    yield from _steps(model, _classes, 12)


def _virtual_tokens(door: Door, kind: str) -> Iterator[list[Any]]:
    import peft

    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(_llama(), config)
    door(model)
    yield from _steps(model, _fixed, 12)


@script("peft", "transformers")
def prompt_tuning(door: Door) -> Iterator[list[Any]]:
    yield from _virtual_tokens(door, "PromptTuningConfig")


@script("peft", "transformers")
def prefix_tuning(door: Door) -> Iterator[list[Any]]:
    yield from _virtual_tokens(door, "PrefixTuningConfig")


@script("transformers")
def t5_training(door: Door) -> Iterator[list[Any]]:
    yield from _steps(door(_t5()), _fixed, 10)


@script("transformers", doors=("dispatch",))
def generate_dynamic(door: Door) -> Iterator[list[Any]]:
    """Greedy search with the cache that grows."""
    model = _llama().eval()
    model.config.use_cache = model.generation_config.use_cache = True
    door(model, dynamic_shapes="auto")
    for i in range(4):
        ids = torch.randint(5, 60, (2, 5 + i), generator=torch.Generator().manual_seed(i))
        yield [model.generate(ids, max_new_tokens=8, do_sample=False)]


@script("transformers", doors=("dispatch",))
def generate_beams(door: Door) -> Iterator[list[Any]]:
    model = _llama().eval()
    model.config.use_cache = model.generation_config.use_cache = True
    door(model)
    for i in range(4):
        ids = torch.randint(5, 60, (2, 6), generator=torch.Generator().manual_seed(i))
        yield [model.generate(ids, max_new_tokens=8, num_beams=3, do_sample=False)]


@script("accelerate")
def accelerate_loop(door: Door) -> Iterator[list[Any]]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = door(
        torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.TensorDataset(torch.randn(50, 6), torch.randint(0, 3, (50,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    prepared, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for _ in range(3):
        for x, y in loader:
            with accelerator.accumulate(prepared):
                loss = torch.nn.functional.cross_entropy(prepared(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            yield [loss]


@script("lightning")
def lightning_whole(door: Door) -> Iterator[list[Any]]:
    """A LightningModule whose forward is dispatched; training_step calls it."""
    import lightning

    losses: list[Tensor] = []

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Sequential(
                torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.log("loss", loss)
            losses.append(loss.detach())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    data = torch.utils.data.TensorDataset(torch.randn(50, 6), torch.randint(0, 3, (50,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    model = Classifier()
    door(model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=3,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            default_root_dir=folder,
            enable_model_summary=False,
        )
        trainer.fit(model, loader, loader)
    for loss in losses:
        yield [loss]
