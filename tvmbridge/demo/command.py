"""``python -m tvmbridge demo``: run and fine-tune MiniLM in eager PyTorch and through TVM.

The demo embeds sentences, fine-tunes a classifier of topics, draws the graphs of one layer, and
reports differences and times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import graphviz
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

from tvmbridge import add_tvm_dispatch, capture, dispatch_report, to_relax, visualize
from tvmbridge.coloring import color, policy_for
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.types import PassRecord
from tvmbridge.demo.learning import (
    Learner,
    draw_batches,
    largest_relative_difference,
    largest_weight_difference,
)
from tvmbridge.demo.minilm import (
    Batch,
    Remarks,
    embed,
    load_bert,
    load_remarks,
    load_tokenizer,
    tokenize,
)
from tvmbridge.differentiation.differentiate import differentiate
from tvmbridge.pipeline import lowering_passes, run_passes

# The timed calls of embedding stop after this time, for slow or busy machines.
_TIMING_SECONDS = 15.0
# Compiled code is what is compared, also where PyTorch is faster.
_COMPILED = CompileOptions(only_if_faster=False)


def run(options: argparse.Namespace) -> int:
    """Run the demo; return the exit status, 1 if a difference is too large or a call fell back."""
    console = Console()
    started = time.perf_counter()
    with _progress(console) as progress:
        demo = Demo(options, progress)
        figures = demo.run()
    figures.write(options.out / "report.json")
    console.print(figures.table())
    written = ["report.json", *(path.name for path in demo.pictures)]
    console.print(f"wrote {', '.join(written)} in {options.out}", soft_wrap=True)
    console.print(f"took {time.perf_counter() - started:.0f} s")
    for failure in figures.failures():
        console.print(f"[bold red]failed:[/] {failure}")
    for reason, calls in demo.fallbacks.items():
        console.print(f"  {calls} calls: {reason}")
    return 1 if figures.failures() else 0


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (
        SpinnerColumn(finished_text="[green]✓[/]"),
        "{task.description}",
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield progress


class Demo:
    """One run of the demo.

    - ``pictures``: the files that :meth:`run` has drawn.
    - ``fallbacks``: the number of calls that ran eager PyTorch instead of TVM, by their reasons.
    """

    def __init__(self, options: argparse.Namespace, progress: Progress) -> None:
        self.options = options
        self.progress = progress
        self.pictures: list[Path] = []
        self.fallbacks: dict[str, int] = {}

    def run(self) -> Figures:
        """Embed sentences, fine-tune, draw graphs, and return the measured figures."""
        with self._task("load MiniLM"):
            eager, tvm = (load_bert(self.options.attention) for _ in range(2))
            remarks = load_remarks()
            tokenizer = load_tokenizer()
        embedding = self._embed(eager, tvm, tokenizer, remarks)
        learning = self._fine_tune(eager, tvm, tokenize(tokenizer, remarks.sentences), remarks)
        with self._task("draw a layer's graphs"), _quiet():
            hidden = torch.zeros(2, 16, eager.config.hidden_size)  # type: ignore[union-attr,arg-type]
            layer = eager.get_submodule("encoder.layer.0")
            self.pictures = draw_layer(layer, hidden, self.options.out)
        report = dispatch_report(tvm)
        self.fallbacks = report.fallbacks
        return Figures(
            **embedding,
            **learning,
            tvm_calls=report.tvm_calls,
            fallbacks=sum(report.fallbacks.values()),
        )

    def _embed(
        self, eager: nn.Module, tvm: nn.Module, tokenizer: Any, remarks: Remarks
    ) -> dict[str, float]:
        batch = tokenize(tokenizer, remarks.sentences[: self.options.sentences])
        with self._task("compile for inference"), _quiet():
            add_tvm_dispatch(tvm, (), sample_kwargs=batch.arguments, options=_COMPILED)
        modules = (eager, tvm)
        seconds: tuple[list[float], list[float]] = ([], [])
        with torch.no_grad(), self._task("embed", self.options.rounds) as task:
            reference, ours = (embed(module, batch) for module in modules)
            end = time.perf_counter() + _TIMING_SECONDS
            for round_ in range(self.options.rounds):
                if round_ and time.perf_counter() > end:
                    break
                for module, times in zip(modules, seconds, strict=True):
                    start = time.perf_counter()
                    module(**batch.arguments)
                    times.append(time.perf_counter() - start)
                self.progress.advance(task)
        return {
            "embedding_max_abs_diff": (ours - reference).abs().max().item(),
            "eager_ms": _median_ms(seconds[0]),
            "tvm_ms": _median_ms(seconds[1]),
        }

    def _fine_tune(
        self, eager: nn.Module, tvm: nn.Module, remarks: Batch, labelled: Remarks
    ) -> dict[str, float]:
        options, topics, labels = self.options, len(labelled.topics), labelled.labels
        size = min(options.batch, len(labels))
        learners = [Learner(bert, topics, options.seed) for bert in (eager, tvm)]
        with self._task("compile for training"), _quiet():
            sample = remarks.rows(torch.arange(size))
            add_tvm_dispatch(tvm, (), sample_kwargs=sample.arguments, options=_COMPILED)
        with self._task("fine-tune", options.steps) as task:
            for rows in draw_batches(len(labels), size, options.steps, options.seed):
                for learner in learners:
                    learner.step(remarks.rows(rows), labels[rows])
                self.progress.advance(task)
        first, second = learners
        return {
            "loss_max_rel_diff": largest_relative_difference(second.losses, first.losses),
            "weights_max_abs_diff": largest_weight_difference(second.classifier, first.classifier),
            "eager_step_ms": _median_ms(first.seconds),
            "tvm_step_ms": _median_ms(second.seconds),
        }

    @contextmanager
    def _task(self, name: str, total: int = 1) -> Iterator[Any]:
        task = self.progress.add_task(name, total=total)
        yield task
        self.progress.update(task, completed=total)


def _median_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress FutureWarnings, which torch.export raises about its own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def draw_layer(layer: nn.Module, hidden_states: torch.Tensor, folder: Path) -> list[Path]:
    """Draw the graphs of a layer in train mode, and return the files that were written.

    - ``layer_before_passes``: the Relax function of the captured graph.
    - ``layer_after_passes``: the same with dropout and layer norm lowered to simpler operators.
    - ``joint_colored``: forward and backward in one function. Forward is red, values that it keeps
      for backward are yellow, backward is blue, and values that both compute are dashed.

    The files are SVGs, or graphviz sources (``.dot``) if the program ``dot`` is not installed.
    """
    captured = capture(layer, hidden_states)
    before = to_relax(captured)
    records: list[PassRecord] = []
    after = run_passes(before, lowering_passes(), records)
    wanted = [d.name for d in captured.inputs if d.requires_grad]
    joint = differentiate(before, wanted, [0], records)
    coloring = color(joint, policy_for(CompileOptions().residual_policy, hidden_states.device))
    graphs = {
        "layer_before_passes": visualize(before),
        "layer_after_passes": visualize(after),
        "joint_colored": visualize(joint.mod["joint"], coloring=coloring),
    }
    return [_write(graph, folder / name) for name, graph in graphs.items()]


def _write(graph: graphviz.Digraph, stem: Path) -> Path:
    stem.parent.mkdir(parents=True, exist_ok=True)
    path = stem.with_suffix(".svg")
    try:
        path.write_bytes(graph.pipe(format="svg"))
    except graphviz.ExecutableNotFound:
        path = stem.with_suffix(".dot")
        path.write_text(graph.source, encoding="utf-8")
    return path


EMBEDDING_BOUND = 1e-5
LOSS_BOUND = 1e-4


@dataclass(frozen=True)
class Figures:
    """The figures of one run of the demo.

    Differences are between TVM and eager PyTorch. Times are medians in ms: ``eager_ms`` and
    ``tvm_ms`` for a call that embeds, ``eager_step_ms`` and ``tvm_step_ms`` for a training step.
    ``fallbacks`` counts calls that ran eager PyTorch instead of TVM.
    """

    embedding_max_abs_diff: float
    loss_max_rel_diff: float
    weights_max_abs_diff: float
    eager_ms: float
    tvm_ms: float
    eager_step_ms: float
    tvm_step_ms: float
    tvm_calls: int
    fallbacks: int

    def failures(self) -> list[str]:
        """Return a sentence for each bound that is exceeded; NaN exceeds every bound."""
        failed = []
        if not self.embedding_max_abs_diff <= EMBEDDING_BOUND:
            failed.append(f"embeddings differ by more than {EMBEDDING_BOUND:g}")
        if not self.loss_max_rel_diff <= LOSS_BOUND:
            failed.append(f"a loss differs by more than {LOSS_BOUND:g} of itself")
        if self.fallbacks:
            failed.append("calls fell back to the module's own forward")
        return failed

    def write(self, path: Path) -> None:
        """Write the figures as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def table(self) -> Table:
        """Return the figures as a table to print."""
        table = Table("", "PyTorch eager", "tvmbridge", "bound", title="MiniLM, side by side")
        for column in table.columns[1:]:
            column.justify = "right"

        def times(what: str, eager: float, tvm: float) -> None:
            table.add_row(what, f"{eager:.1f}", f"{tvm:.1f}  ({eager / tvm:.2f}x)", "")

        def difference(what: str, value: float, bound: str = "") -> None:
            table.add_row(f"max |Δ| of {what}", "", f"{value:.1e}", bound)

        difference("embeddings", self.embedding_max_abs_diff, f"{EMBEDDING_BOUND:.0e}")
        difference("losses, relative", self.loss_max_rel_diff, f"{LOSS_BOUND:.0e}")
        difference("weights after the last step", self.weights_max_abs_diff)
        times("ms per call, embedding", self.eager_ms, self.tvm_ms)
        times("ms per step, fine-tuning", self.eager_step_ms, self.tvm_step_ms)
        table.add_row("calls served by TVM", "", str(self.tvm_calls), "")
        table.add_row("calls that fell back", "", str(self.fallbacks), "0")
        return table
