"""``dynamic_shapes="auto"`` in ordinary uses: the share of calls served, and speed against eager.

``--rows trainer generate resnet layer compilation`` chooses some rows. The row ``trainer`` needs
transformers and accelerate; without them a line says so.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.any_size_models import MODELS
from benchmarks.common import Row, alternate, parser, report
from tests.end_to_end.steps import base_layer
from tests.random_sizes.sequences import step as train_or_evaluate
from tvmbridge import CompileOptions, add_tvm_dispatch, dispatch_report

LENGTHS = (24, 56, 88, 120, 200)


def _served(module: nn.Module, since: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Return the calls that TVM served and all calls, both minus the counts in ``since``."""
    told = dispatch_report(module)
    calls = told.tvm_calls + sum(told.fallbacks.values())
    return told.tvm_calls - since[0], calls - since[1]


def _share(name: str, served: tuple[int, int], bound: float) -> Row:
    """Return a row with the share of calls that TVM did not serve.

    ``bound`` is the least share served; a row's own bound is an upper one.
    """
    missed = 1 - served[0] / max(1, served[1])
    return Row(f"{name}: calls that TVM did not serve", missed, "", 1 - bound)


def trainer(budget: float | None = None) -> Iterator[Row]:
    """Train a BERT of 4 layers on 500 sentences with dynamic padding, 3 epochs, and evaluate it.

    ``budget`` is the compilation budget of ``add_tvm_dispatch``, in seconds.
    """
    try:
        import accelerate  # type: ignore[import-untyped]  # noqa: F401
        from transformers import (
            BertConfig,
            BertForSequenceClassification,
            Trainer,
            TrainerCallback,
            TrainingArguments,
        )
    except ImportError as error:
        print(f"no row for the Trainer: {error}")
        return
    draw = random.Random(0)
    sentences = [
        ([draw.randrange(5, 1000) for _ in range(draw.randint(6, 48))], draw.randint(0, 1))
        for _ in range(500)
    ]

    def collate(batch: list[tuple[list[int], int]]) -> dict[str, torch.Tensor]:
        longest = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch])
        labels = torch.tensor([label for _, label in batch])
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}

    class After(TrainerCallback):
        """Record the number of calls at the end of a step."""

        at = (0, 0)

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if state.global_step == 20 and "forward" in named["model"].__dict__:
                self.at = _served(named["model"])

    def run(dispatched: bool) -> tuple[list[float], float, list[Row]]:
        torch.manual_seed(0)
        model = BertForSequenceClassification(
            BertConfig(
                vocab_size=1000,
                hidden_size=128,
                num_hidden_layers=4,
                num_attention_heads=4,
                intermediate_size=256,
            )
        )
        if dispatched:
            add_tvm_dispatch(model, dynamic_shapes="auto", budget=budget)
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder,
                num_train_epochs=3,
                logging_steps=10,
                report_to=[],
                save_strategy="no",
                use_cpu=True,
                disable_tqdm=True,
            )
            after = After()
            made = Trainer(
                model=model,
                args=arguments,
                train_dataset=sentences,  # type: ignore[arg-type]
                eval_dataset=sentences[:100],  # type: ignore[arg-type]
                data_collator=collate,
                callbacks=[after],
            )
            start = time.perf_counter()
            made.train()
            losses = [x["loss"] for x in made.state.log_history if "loss" in x]
            losses.append(made.evaluate()["eval_loss"])
            seconds = time.perf_counter() - start
        rows = [_share("Trainer", _served(model, after.at), 0.95)] if dispatched else []
        return losses, seconds, rows

    theirs, eager, _ = run(dispatched=False)
    ours, seconds, rows = run(dispatched=True)
    yield from rows
    error = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    yield Row("Trainer: losses, relative difference", error, "", 1e-5)
    yield Row("Trainer: wall time with compilations over eager's", seconds / eager, "", 1.0)


def generate() -> Iterator[Row]:
    """Generate 200 tokens greedily by GPT-2 small with random weights and a dynamic cache."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    plain = GPT2LMHeadModel(GPT2Config()).eval()
    module = copy.deepcopy(plain)
    prompt = torch.randint(0, 50257, (1, 16))

    def run(model: Any) -> torch.Tensor:
        found: torch.Tensor = model.generate(
            prompt, max_new_tokens=200, do_sample=False, pad_token_id=0
        )
        return found

    add_tvm_dispatch(module, dynamic_shapes="auto", on_fallback="silent")
    run(module)
    first = _served(module)
    yield Row("generate: tokens that differ", float((run(module) != run(plain)).sum()), "", 0.0)
    yield _share("generate", _served(module, first), 0.95)
    ours, theirs = alternate([lambda: run(module), lambda: run(plain)], rounds=3, warmup=0)
    yield Row("generate: time over eager's", ours / theirs, "", 1.0)


def resnet() -> Iterator[Row]:
    """Train torchvision's ResNet-18 on batches of 32 and a last batch of 7."""
    try:
        from torchvision.models import resnet18  # type: ignore[import-untyped]
    except ImportError as error:
        print(f"no row for the ResNet: {error}")
        return
    module = resnet18(num_classes=10).train()
    add_tvm_dispatch(module, dynamic_shapes="auto")
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    since = (0, 0)
    for epoch, rows in itertools.product(range(3), (32, 32, 7)):
        optimizer.zero_grad()
        module(torch.randn(rows, 3, 64, 64)).square().mean().backward()
        optimizer.step()
        if epoch == 1 and since == (0, 0):
            since = _served(module)
    yield _share("ResNet-18 after the second epoch's first step", _served(module, since), 1.0)


def layer() -> Iterator[Row]:
    """Measure a BertLayer at five lengths: time of symbolic code over code for that size."""
    for training in (False, True):
        plain = base_layer("sdpa").train(training)
        symbolic = copy.deepcopy(plain)
        first = torch.randn(4, 16, 768)
        add_tvm_dispatch(symbolic, first, dynamic_shapes="auto")
        for length in LENGTHS:
            x = torch.randn(4, length, 768)
            static = add_tvm_dispatch(copy.deepcopy(plain), x)
            steps = [_step(m, x, training) for m in (symbolic, static)]
            ours, theirs = alternate(steps, rounds=30)
            name = f"BertLayer 4x{length}, {'training' if training else 'inference'}"
            yield Row(f"{name}: symbolic over static", ours / theirs, "", 1.1)
        yield _share("BertLayer", _served(symbolic), 1.0)


def compilation() -> Iterator[Row]:
    """Measure the CPU time of a compilation for any size over one for a single size.

    The module's first compilation is not measured: it compiles what later ones reuse.
    """
    for name in ("llama", "lstm", "resnet", "bert"):
        model = MODELS[name]
        plain = model.build()
        common = [tuple((a + b) // 2 + i for a, b in model.ranges) for i in range(3)]
        for training in (False, True):
            seconds = {}
            ways: list[tuple[str, Any, list[tuple[int, ...]]]] = [
                ("first", None, common[2:]),
                ("one", None, common[1:2]),
                ("any", "auto", common[:2]),
            ]
            for way, shapes, calls in ways:
                module = copy.deepcopy(plain)
                options = CompileOptions(cache=False)
                add_tvm_dispatch(module, options=options, dynamic_shapes=shapes)
                for sizes in calls:
                    start = time.thread_time()
                    train_or_evaluate(module, model, model.arguments(*sizes), training)
                    seconds[way] = time.thread_time() - start
            what = f"{name}, {'training' if training else 'inference'}"
            ratio = seconds["any"] / seconds["one"]
            yield Row(f"{what}: compilation for any size over one, CPU time", ratio, "", 1.3)


def _step(module: nn.Module, x: torch.Tensor, training: bool) -> Callable[[], object]:
    def step() -> object:
        with torch.set_grad_enabled(training):
            found = module(x)
        found = found if isinstance(found, torch.Tensor) else found[0]
        return found.sum().backward() if training else found

    return step


ROWS: dict[str, Callable[[], Iterator[Row]]] = {
    "trainer": trainer,
    "generate": generate,
    "resnet": resnet,
    "layer": layer,
    "compilation": compilation,
}


def main(argv: Sequence[str] = ()) -> int:
    """Measure the chosen rows, or all."""
    options = parser(__doc__)
    options.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    options.add_argument("--budget", type=float, help="seconds that the Trainer waits for code")
    chosen = options.parse_args(list(argv))
    rows = {**ROWS, "trainer": functools.partial(trainer, chosen.budget)}
    table = [row for name in chosen.rows for row in rows[name]()]
    return report("any size", table, check=not chosen.no_check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
