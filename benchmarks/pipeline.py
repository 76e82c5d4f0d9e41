"""Pipelines over several devices: results, idle share, throughput and memory, against one process.

``python -m benchmarks.pipeline`` starts a process for each GPU, or ``--ranks`` processes on a CPU.
Each row gets new processes, so that a row that fails or hangs does not end the others. Under
torchrun all rows run in torchrun's processes. Rank 0 prints each figure, and a table at the end.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import Row, parser, report
from benchmarks.pipeline_common import in_turns, made, spread, step_seconds
from benchmarks.pipeline_cut import CUTS, cut
from benchmarks.pipeline_equal import BOUNDS, equal
from benchmarks.pipeline_memory import peak_activations
from benchmarks.pipeline_models import MODELS, cross_entropy, model_of
from benchmarks.pipeline_start import join, measured, start_rows
from benchmarks.pipeline_zero import zero_bubble
from tvmbridge import add_tvm_dispatch
from tvmbridge.distributed import PipelineRunner, plan_pipeline
from tvmbridge.distributed.orders import SCHEDULES


def idle(options: argparse.Namespace) -> Iterator[Row]:
    """Measure the idle share of a step.

    The theoretical share in a row's name assumes equal stages, one a device.
    """
    ranks = dist.get_world_size()
    cases = (("simple", ranks), ("interleaved", ranks), ("interleaved", 2 * ranks))
    for count in options.microbatches:
        theory = (ranks - 1) / (count + ranks - 1)
        for schedule, stages in cases:
            if stages > ranks and count % max(1, count // ranks):
                continue
            runner, inputs, targets = made(
                options, "blocks", torch.float32, options.size * count, microbatches=count,
                schedule=schedule, stages=stages,
            )  # fmt: skip
            shares = _idle_shares(runner, inputs, targets)
            bound = theory + 0.05 if stages == ranks else theory
            name = f"idle share, {schedule}, {stages} stages on {ranks}, {count} micro-batches"
            told = f"{name} (theory {theory:.3f}, spread {spread(shares):.3f})"
            yield Row(told, statistics.median(shares), "", bound)
            _end(runner)


def _end(*runners: PipelineRunner) -> None:
    for runner in runners:
        runner.close()
    gc.collect()


def _idle_shares(runner: PipelineRunner, inputs: Any, targets: Any) -> list[float]:
    for _ in range(3):
        runner.step(inputs, targets)
    shares = []
    for _ in range(5):
        runner.step(inputs, targets, profile=True)
        assert runner.measured is not None
        shares.append(runner.measured.idle)
    return shares


def throughput(options: argparse.Namespace) -> Iterator[Row]:
    """Compare a step over all devices with a step on one, by TVM or eager, whichever is faster.

    The model is BERT-large on GPUs, and a stack of blocks on the CPU, unless one is chosen.
    """
    count = options.microbatches[-1]
    batch = options.size * count
    name = options.model or ("bert-large" if torch.cuda.is_available() else "blocks")
    runner, inputs, targets = made(
        options, name, torch.float32, batch, microbatches=count, schedule=options.schedule
    )
    train = functools.partial(_train, runner, inputs, targets)
    times = step_seconds(train, options.rounds)
    together = statistics.median(times)
    yield Row(f"{name}: step (spread {1e3 * spread(times):.2g})", 1e3 * together, "ms")
    found = [0.0, 0.0]
    if dist.get_rank() == 0:
        found = [
            _alone(name, batch, count, runner.device, options.rounds, tvm) for tvm in (False, True)
        ]
    # The other ranks wait on the CPU here: waiting in NCCL would keep their GPUs busy.
    eager, tvm_time = runner.control.share(found)
    _end(runner)
    yield Row(f"{name}: step of one device, eager PyTorch", 1e3 * eager, "ms")
    yield Row(f"{name}: step of one device, TVM", 1e3 * tvm_time, "ms")
    ranks, alone = dist.get_world_size(), min(eager, tvm_time)
    yield Row(
        f"{name}: time over one device's divided by {ranks}", together * ranks / alone, "", 1.25
    )
    yield Row(f"{name}: steps a second over one device's", alone / together, "times")


def _train(runner: PipelineRunner, inputs: Any, targets: Any) -> None:
    runner.step(inputs, targets)
    runner.zero_grad()


def _alone(
    name: str, batch: int, count: int, device: torch.device, rounds: int, tvm: bool
) -> float:
    """Return the median seconds of a step of the whole model on this rank's device alone."""
    module, inputs, targets = model_of(name, torch.float32, batch)
    module.to(device)
    parts = [t.to(device).chunk(count) for t in (inputs, targets)]
    if tvm:
        add_tvm_dispatch(module, parts[0][0])

    def step() -> None:
        for x, y in zip(*parts, strict=True):
            (cross_entropy(module(x), y) / count).backward()
        module.zero_grad()

    return statistics.median(step_seconds(step, rounds))


def bare(options: argparse.Namespace) -> Iterator[Row]:
    """Compare compiled stages with the same stages in eager PyTorch, in turns."""
    count = options.microbatches[-1]
    name = options.model or ("bert-large" if torch.cuda.is_available() else "minilm")
    batch = options.size * count
    begins = _automatic_cut(name, batch, count, options.schedule)
    runners, runs = [], []
    for tvm in (False, True):
        runner, inputs, targets = made(
            options, name, torch.float32, batch, microbatches=count,
            schedule=options.schedule, stages=begins, tvm=tvm,
        )  # fmt: skip
        runners.append(runner)
        runs.append(functools.partial(_train, runner, inputs, targets))
    eager, compiled = in_turns(runs, options.rounds)
    _end(*runners)
    for what, times in (("bare engine", eager), ("TVM", compiled)):
        told = f"{name}: step, {what} (spread {1e3 * spread(times):.2g})"
        yield Row(told, 1e3 * statistics.median(times), "ms")
    ratios = [b / a for a, b in zip(eager, compiled, strict=True)]
    told = f"{name}: step time over the bare engine's (spread {spread(ratios):.3f})"
    yield Row(told, statistics.median(ratios), "", 1.0)


def _automatic_cut(name: str, batch: int, count: int, schedule: str) -> list[str]:
    """Return the names of the submodules where later stages begin, as rank 0 plans them."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        module, inputs, _ = model_of(name, torch.float32, batch)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        plan = plan_pipeline(
            module, inputs, microbatches=count, schedule=schedule, stages=dist.get_world_size(),
            device=device,
        )  # fmt: skip
        print(plan, flush=True)
        found = [[s.begins for s in plan.stages[1:]]]
    dist.broadcast_object_list(found, src=0)
    begins: list[str] = found[0]
    return begins


def memory(options: argparse.Namespace) -> Iterator[Row]:
    """Compare the peak of activations on the first stage: interleaved schedule over simple."""
    count = options.microbatches[-1]
    bound = 0.4 if dist.get_world_size() >= 4 else None
    for tvm in (False, True):
        peaks = []
        for schedule in ("simple", "interleaved"):
            # Comparing batches would take memory, too.
            runner, inputs, targets = made(
                options, "blocks", torch.float32, options.size * count, microbatches=count,
                schedule=schedule, tvm=tvm, check_batches=False,
            )  # fmt: skip
            peaks.append(peak_activations(runner, inputs, targets))
            _end(runner)
        name = f"activations of the first stage, {'TVM' if tvm else 'eager PyTorch'}"
        yield Row(f"{name}, simple", peaks[0] / 2**20, "MiB")
        yield Row(f"{name}, interleaved over simple", peaks[1] / peaks[0], "", bound)


ROWS = {
    "equal": equal,
    "idle": idle,
    "zero_bubble": zero_bubble,
    "throughput": throughput,
    "bare": bare,
    "memory": memory,
    "cut": cut,
}


def main() -> int:
    """Measure the chosen rows."""
    options = _parsed()
    if "RANK" not in os.environ:
        return start_rows(options, sys.argv[1:])
    join()
    rows = [row for name in options.rows for row in measured(name, ROWS[name], options)]
    status = 0
    if dist.get_rank() == 0:
        title = f"pipelines over {dist.get_world_size()} devices"
        status = report(title, rows, check=not options.no_check)
    dist.destroy_process_group()
    return status


def _parsed() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--rows", nargs="*", choices=ROWS, default=list(ROWS))
    made.add_argument("--models", nargs="*", choices=MODELS, default=["minilm", "gpt2"])
    made.add_argument("--model", choices=MODELS, help="of `throughput` and `bare`")
    made.add_argument("--microbatches", nargs="*", type=int, default=[8, 16])
    made.add_argument("--stages", nargs="*", type=int, help="of `equal`; else 1 and 2 a device")
    made.add_argument("--dtypes", nargs="*", choices=BOUNDS, default=list(BOUNDS))
    made.add_argument("--schedule", default="interleaved")
    made.add_argument("--schedules", nargs="*", choices=SCHEDULES, default=SCHEDULES[:2],
                      help="of `equal`")  # fmt: skip
    made.add_argument("--cuts", nargs="*", choices=CUTS, default=CUTS, help="models of `cut`")
    made.add_argument("--size", type=int, default=8, help="rows of a micro-batch")
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--ranks", type=int, help="processes; else one a GPU, or two")
    made.add_argument("--limit", type=float, default=540, help="seconds of a row")
    made.add_argument("--timeout", type=float, default=300, help="seconds that ranks wait")
    return made.parse_args()


if __name__ == "__main__":
    sys.exit(main())
