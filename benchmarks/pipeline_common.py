"""Helpers of the rows of ``benchmarks.pipeline``: a runner with its batch, and timing."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.pipeline_models import cross_entropy, model_of
from tvmbridge.distributed import PipelineRunner, pipeline


def made(
    options: argparse.Namespace, name: str, dtype: torch.dtype, batch: int, **settings: Any
) -> tuple[PipelineRunner, torch.Tensor, torch.Tensor]:
    """Return a pipeline runner for the model ``name``, and a batch on its device."""
    module, inputs, targets = model_of(name, dtype, batch)
    settings = {"loss": cross_entropy, "timeout": options.timeout, **settings}
    runner = pipeline(module, inputs, **settings)
    return runner, inputs.to(runner.device), targets.to(runner.device)


def step_seconds(run: Callable[[], Any], rounds: int, warm_up: int = 3) -> list[float]:
    """Return the seconds of each of ``rounds`` calls, after ``warm_up`` calls without timing."""
    for _ in range(warm_up):
        run()
    times = []
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - start)
    return times


def in_turns(runs: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """Call the functions in turns, each after an untimed call of its own; return their seconds."""
    times: list[list[float]] = [[] for _ in runs]
    for number in range(rounds):
        for run, record in zip(runs, times, strict=True):
            record += step_seconds(run, 1, warm_up=1 if number else 3)
    return times


def spread(values: Sequence[float]) -> float:
    """Return half the distance between the quartiles."""
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4)
    return (third - first) / 2


def wait() -> None:
    """Wait until the GPU has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
