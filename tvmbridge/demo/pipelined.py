"""``make demo-pipeline``: fine-tune MiniLM in a pipeline of two processes, and in one process.

The command starts the processes. Each rank runs :func:`train`, as a script of a user would.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

from tvmbridge.demo.learning import draw_batches, largest_relative_difference
from tvmbridge.demo.minilm import load_bert, load_remarks, load_tokenizer, mean_pool, tokenize
from tvmbridge.distributed import draw_timelines, pipeline, plan_pipeline
from tvmbridge.distributed.orders import Span, Timeline, Work

MICROBATCHES = 4
# Name, number of processes, and schedule of each run; the first is the reference of the losses.
RUNS = (("one process", 1, "simple"), ("simple", 2, "simple"), ("interleaved", 2, "interleaved"))


class Classifier(nn.Module):
    """BERT with a linear head over the mean of its token vectors."""

    def __init__(self, topics: int) -> None:
        super().__init__()
        self.bert = load_bert()
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(self.bert.config.hidden_size, topics)  # type: ignore[union-attr,arg-type]

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the score of each topic for each sentence."""
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        scores: torch.Tensor = self.head(self.dropout(mean_pool(hidden, attention_mask)))
        return scores


def batches(steps: int, size: int) -> tuple[list[tuple[dict[str, torch.Tensor], Any]], int]:
    """Return the inputs and labels of each step, and the number of topics; equal on all ranks."""
    remarks = load_remarks()
    batch = tokenize(load_tokenizer(), remarks.sentences)
    found = [
        (batch.rows(rows).arguments, remarks.labels[rows])
        for rows in draw_batches(len(remarks.sentences), size, steps, seed=0)
    ]
    return found, len(remarks.topics)


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train on one rank with a pipeline, profile one more step, and return the measurements."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data, topics = batches(options.steps, options.batch)
    model = Classifier(topics).train()
    runner = pipeline(
        model,
        data[0][0],
        microbatches=MICROBATCHES,
        schedule=options.schedule,
        stages=[options.cut],
        loss=nn.functional.cross_entropy,
    )
    optimizer = torch.optim.AdamW(runner.parameters(), lr=5e-5)
    losses = []
    for inputs, labels in data:
        losses.append(runner.step(inputs, labels).mean().item())
        optimizer.step()
        optimizer.zero_grad()
    inputs, labels = data[-1]
    runner.step(inputs, labels, profile=True)
    report = runner.report()
    assert runner.measured is not None
    number, predicted = runner.control.rank, runner.plan.predicted()
    # Without this, the threads of the process group would end only as the interpreter exits.
    runner.close()
    dist.destroy_process_group()
    return {
        "losses": losses,
        "rank": number,
        "share": report.share,
        "eager": sum(s.eager is not None for s in report.stages),
        "spans": [[tuple(s) for s in rank] for rank in runner.measured.spans],
        "predicted": [[tuple(s) for s in rank] for rank in predicted.spans],
    }


def timeline(spans: Any) -> Timeline:
    """Build a timeline from the spans that a worker wrote as JSON."""
    return Timeline(tuple(tuple(Span(Work(*w), a, b) for w, a, b in rank) for rank in spans))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status, 1 if losses differ or a stage is not compiled."""
    options = _parser().parse_args(argv)
    if options.worker is not None:
        found = train(options)
        if found["rank"] == 0:
            options.worker.write_text(json.dumps(found), encoding="utf-8")
        return 0
    console = Console()
    options.out.mkdir(parents=True, exist_ok=True)
    options.cut = _plan(options, console)
    found = {}
    for name, processes, schedule in RUNS:
        with console.status(f"training: {name}"):
            found[name] = _run(options, processes, schedule)
    return _tell(found, options.out, console)


def _plan(options: argparse.Namespace, console: Console) -> str:
    """Plan two stages by measured times; return the submodule where the second one begins."""
    torch.set_num_threads(1)
    data, topics = batches(1, options.batch)
    plan = plan_pipeline(
        Classifier(topics).train(), data[0][0], microbatches=MICROBATCHES, stages=2
    )
    console.print("[bold]the plan, before anything is compiled")
    print(plan)
    return plan.stages[1].begins


def _run(options: argparse.Namespace, processes: int, schedule: str) -> dict[str, Any]:
    target = options.out / "worker.json"
    target.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(processes), "-m", "tvmbridge.demo.pipelined",
        "--worker", str(target), "--schedule", schedule, "--cut", options.cut,
        "--steps", str(options.steps), "--batch", str(options.batch),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        raise SystemExit(1)
    found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    target.unlink()
    return found


def _tell(found: dict[str, Any], folder: Path, console: Console) -> int:
    """Print a table of losses and idle shares, draw the timelines, and return the exit status."""
    reference = found[RUNS[0][0]]["losses"]
    table = Table("", "first losses", "last loss", "difference", "idle, predicted", "measured")
    failed = False
    for name, run in found.items():
        difference = largest_relative_difference(run["losses"], reference)
        failed |= difference > 1e-5 or run["eager"] > 0 or run["share"] < 1
        predicted, measured = timeline(run["predicted"]), timeline(run["spans"])
        first = " ".join(f"{loss:.4f}" for loss in run["losses"][:3])
        idle = (f"{predicted.idle:.3f}", f"{measured.idle:.3f}")
        table.add_row(name, first, f"{run['losses'][-1]:.4f}", f"{difference:.0e}", *idle)
        picture = draw_timelines({f"{name}, predicted": predicted, "measured": measured})
        path = folder / f"timeline_{name.replace(' ', '_')}.svg"
        path.write_text(picture, encoding="utf-8")
    console.print(table)
    (folder / "report.json").write_text(json.dumps(found), encoding="utf-8")
    console.print(f"wrote report.json and timelines in {folder}", soft_wrap=True)
    if failed:
        console.print("[bold red]failed:[/] losses differ, or not all stages ran through TVM")
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tvmbridge.demo.pipelined", description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="steps of AdamW")
    parser.add_argument("--batch", type=int, default=16, help="remarks in a step")
    parser.add_argument("--out", type=Path, default=Path("build/demo-pipeline"), metavar="FOLDER")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--schedule", default="interleaved", help=argparse.SUPPRESS)
    parser.add_argument("--cut", default="", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
