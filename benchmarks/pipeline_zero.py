"""The row ``zero_bubble`` of ``benchmarks.pipeline``: the schedule without bubbles."""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import Row
from benchmarks.pipeline_common import in_turns, made, spread
from tvmbridge.distributed import PipelineRunner
from tvmbridge.distributed.orders import Durations, orders, predict

_SCHEDULES = ("interleaved", "zero_bubble")


def zero_bubble(options: argparse.Namespace) -> Iterator[Row]:
    """Compare zero bubble with interleaved 1F1B, two equal stages a rank, in turns."""
    ranks, count = dist.get_world_size(), options.microbatches[0]
    stages = 2 * ranks
    runners, runs = [], []
    for schedule in _SCHEDULES:
        runner, inputs, targets = made(
            options, "blocks", torch.float32, options.size * count, microbatches=count,
            schedule=schedule, stages=stages,
        )  # fmt: skip
        runners.append(runner)
        runs.append(functools.partial(_train, runner, inputs, targets))
    one, other = in_turns(runs, options.rounds)
    ratios = [b / a for a, b in zip(one, other, strict=True)]
    name = f"{stages} stages on {ranks}, {count} micro-batches"
    told = f"step, zero bubble over interleaved, {name} (spread {spread(ratios):.3f})"
    yield Row(told, statistics.median(ratios), "", 0.95)
    for schedule, runner in zip(_SCHEDULES, runners, strict=True):
        # In theory forward and each half of backward take equally long.
        order = orders(schedule, stages, ranks, count)
        theory = predict(order, [Durations(1, 2)] * stages).idle
        shares = []
        for _ in range(5):
            runner.step(inputs, targets, profile=True)
            assert runner.measured is not None
            shares.append(runner.measured.idle)
        told = f"idle share, {schedule}, {name} (theory {theory:.3f}, spread {spread(shares):.3f})"
        bound = theory + 0.03 if schedule == "zero_bubble" else None
        yield Row(told, statistics.median(shares), "", bound)
    for runner in runners:
        runner.close()
    gc.collect()


def _train(runner: PipelineRunner, inputs: Any, targets: Any) -> None:
    runner.step(inputs, targets)
    runner.zero_grad()
