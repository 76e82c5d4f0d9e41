"""Pipelines over several devices: results, idle share, throughput and memory, against one process.

Started on every rank by ``python -m torch.distributed.run --standalone --nproc-per-node 2 -m
benchmarks.pipeline``; rank 0 prints one table at the end. On GPUs where there are some.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common import Row, parser, report
from benchmarks.pipeline_models import MODELS, blocks_model, cross_entropy, kept_memory, model_of
from tvmbridge import add_tvm_dispatch
from tvmbridge.distributed import PipelineRunner, pipeline

ROWS = ("equal", "idle", "throughput", "bare", "memory", "cut")
STEPS = 20


def made(name: str, dtype: torch.dtype, batch: int, **settings: Any) -> tuple[Any, ...]:
    """A runner for a model, its module, and a batch."""
    module, inputs, targets = model_of(name, dtype, batch)
    runner = pipeline(module, inputs, loss=cross_entropy, timeout=120, **settings)
    return runner, inputs, targets


def step_seconds(run: Callable[[], Any], rounds: int) -> float:
    """The median of steps, after three to warm up."""
    for _ in range(3):
        run()
    times = []
    for _ in range(rounds):
        _wait()
        start = time.perf_counter()
        run()
        _wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def equal(options: argparse.Namespace) -> Iterator[Row]:
    """Losses and weights after 20 steps against one process on the same micro-batches."""
    for name in options.models:
        for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            for schedule in ("simple", "interleaved"):
                for stages in _stage_counts(options):
                    worst = _difference(name, dtype, schedule, stages, options)
                    title = f"{name}, {stages} stages, {schedule}, {str(dtype).split('.')[1]}"
                    yield Row(f"{title}: losses and weights", worst, "relative", bound)


def _difference(
    name: str, dtype: torch.dtype, schedule: str, stages: int, options: argparse.Namespace
) -> float:
    count = options.microbatches[0]
    settings = {"microbatches": count, "schedule": schedule, "stages": stages}
    runner, inputs, targets = made(name, dtype, 2 * count, **settings)
    # Momentum, not Adam: that divides gradients by their size, and so rounding by rounding.
    optimizer = torch.optim.SGD(runner.parameters(), lr=1e-2, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        losses.append(runner.step(inputs, targets))
        optimizer.step()
        optimizer.zero_grad()
    state = runner.full_state_dict()
    expected, weights = _reference(name, dtype, count, runner.device)
    found = torch.cat(losses)
    worst = float(((found - expected).abs() / expected.abs()).max())
    for key, tensor in weights.items():
        if tensor.is_floating_point():
            scale = float(tensor.abs().max()) or 1.0
            worst = max(worst, float((state[key] - tensor).abs().max()) / scale)
    return worst


def _reference(
    name: str, dtype: torch.dtype, count: int, device: torch.device
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    module, inputs, targets = model_of(name, dtype, 2 * count)
    module.to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        for x, y in zip(inputs.chunk(count), targets.chunk(count), strict=True):
            loss = cross_entropy(module(x.to(device)), y.to(device))
            (loss / count).backward()
            losses.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), {n: t.detach().cpu() for n, t in module.state_dict().items()}


def _stage_counts(options: argparse.Namespace) -> Sequence[int]:
    ranks = dist.get_world_size()
    return options.stages or (ranks, 2 * ranks)


def idle(options: argparse.Namespace) -> Iterator[Row]:
    """The idle share of a measured step; the theory is that of equal stages, one a device."""
    ranks = dist.get_world_size()
    for count in options.microbatches:
        theory = (ranks - 1) / (count + ranks - 1)
        for schedule, stages in (
            ("simple", ranks),
            ("interleaved", ranks),
            ("interleaved", 2 * ranks),
        ):
            name = f"idle share, {schedule}, {stages} stages on {ranks}, {count} micro-batches"
            if stages > ranks and count % max(1, count // ranks):
                continue
            runner, inputs, targets = made(
                "blocks", torch.float32, options.size * count, microbatches=count,
                schedule=schedule, stages=stages,
            )  # fmt: skip
            for _ in range(3):
                runner.step(inputs, targets)
            shares = []
            for _ in range(5):
                runner.step(inputs, targets, profile=True)
                assert runner.measured is not None
                shares.append(runner.measured.idle)
            bound = theory + 0.05 if stages == ranks else theory
            yield Row(f"{name} (theory {theory:.3f})", statistics.median(shares), "", bound)


def throughput(options: argparse.Namespace) -> Iterator[Row]:
    """BERT-large over all devices against one: the best of TVM and eager PyTorch there."""
    count = options.microbatches[-1]
    name, dtype = ("bert-large" if torch.cuda.is_available() else "blocks"), torch.float32
    runner, inputs, targets = made(
        name, dtype, options.size * count, microbatches=count, schedule=options.schedule
    )
    together = step_seconds(lambda: _train(runner, inputs, targets), options.rounds)
    alone = _alone(name, dtype, options.size * count, count, runner.device, options.rounds)
    ranks = dist.get_world_size()
    yield Row(
        f"{name}: time over one device's divided by {ranks}", together * ranks / alone, "", 1.25
    )
    yield Row(f"{name}: steps a second over one device's", alone / together, "times")


def _train(runner: PipelineRunner, inputs: Any, targets: Any) -> None:
    runner.step(inputs, targets)
    runner.zero_grad()


def _alone(
    name: str, dtype: torch.dtype, batch: int, count: int, device: torch.device, rounds: int
) -> float:
    """One device with the whole model; the other ranks wait."""
    found = [0.0]
    if dist.get_rank() == 0:
        times = []
        for tvm in (False, True):
            module, inputs, targets = model_of(name, dtype, batch)
            module.to(device)
            parts = [t.to(device).chunk(count) for t in (inputs, targets)]
            if tvm:
                add_tvm_dispatch(module, parts[0][0])

            def step(module: nn.Module = module, parts: Any = parts) -> None:
                for x, y in zip(*parts, strict=True):
                    (cross_entropy(module(x), y) / count).backward()
                module.zero_grad()

            times.append(step_seconds(step, rounds))
        found = [min(times)]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def bare(options: argparse.Namespace) -> Iterator[Row]:
    """Against the same stages on the engine without TVM, in turns."""
    count = options.microbatches[-1]
    name = "bert-large" if torch.cuda.is_available() else "minilm"
    runners = []
    cut: Any = None
    for tvm in (False, True):
        runner, inputs, targets = made(
            name, torch.float32, options.size * count, microbatches=count,
            schedule=options.schedule, stages=cut, tvm=tvm,
        )  # fmt: skip
        cut = [s.begins for s in runner.plan.stages[1:]]
        runners.append(runner)
    times: list[list[float]] = [[], []]
    for _ in range(options.rounds):
        for runner, record in zip(runners, times, strict=True):
            step = functools.partial(_train, runner, inputs, targets)
            record.append(step_seconds(step, 1))
    eager, tvm_time = map(statistics.median, times)
    yield Row(f"{name}: step time over the bare engine's", tvm_time / eager, "", 1.0)


def memory(options: argparse.Namespace) -> Iterator[Row]:
    """Activations at their peak on the first stage, interleaved over simple."""
    count = options.microbatches[-1]
    peaks = []
    for schedule in ("simple", "interleaved"):
        runner, inputs, targets = made(
            "blocks", torch.float32, options.size * count, microbatches=count, schedule=schedule
        )
        _train(runner, inputs, targets)
        with kept_memory() as kept:
            _train(runner, inputs, targets)
        peaks.append(kept[0])
    bound = 0.4 if dist.get_world_size() >= 4 else None
    yield Row(
        "activations of the first stage, interleaved over simple", peaks[1] / peaks[0], "", bound
    )


def cut(options: argparse.Namespace) -> Iterator[Row]:
    """The automatic cut against all others, by real steps in eager PyTorch."""
    ranks = dist.get_world_size()
    if ranks != 2:
        return
    count = options.microbatches[0]
    for name in ("4 alike", "8 growing", "12 shrinking", "16 alike", "16 mixed"):
        module, inputs, targets = blocks_model(name, options.size * count)
        settings = {"microbatches": count, "loss": cross_entropy, "tvm": False, "timeout": 120}
        automatic = pipeline(module, inputs, **settings)
        runners = {"automatic": automatic}
        for i in range(1, len(module.blocks)):
            runners[str(i)] = pipeline(module, inputs, stages=[f"blocks.{i}"], **settings)
        times: dict[str, list[float]] = {key: [] for key in runners}
        for _ in range(options.rounds):
            for key, runner in runners.items():
                step = functools.partial(_train, runner, inputs, targets)
                times[key].append(step_seconds(step, 1))
        medians = {key: statistics.median(found) for key, found in times.items()}
        yield Row(
            f"cut of {name}: over the best", medians["automatic"] / min(medians.values()), "", 1.05
        )


def main() -> int:
    """Measure the rows that are asked for."""
    arguments = parser(__doc__)
    arguments.add_argument("--rows", nargs="*", choices=ROWS, default=ROWS)
    arguments.add_argument("--models", nargs="*", choices=MODELS, default=["minilm", "gpt2"])
    arguments.add_argument("--microbatches", nargs="*", type=int, default=[8, 16])
    arguments.add_argument(
        "--stages", nargs="*", type=int, help="of `equal`; else 1 and 2 a device"
    )
    arguments.add_argument("--schedule", default="interleaved")
    arguments.add_argument("--size", type=int, default=8, help="rows of a micro-batch")
    arguments.add_argument("--rounds", type=int, default=7)
    options = arguments.parse_args()
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rows: list[Row] = []
    for name in options.rows:
        start = time.perf_counter()
        rows += globals()[name](options)
        if dist.get_rank() == 0:
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    dist.barrier()
    status = 0
    if dist.get_rank() == 0:
        status = report(
            f"pipelines over {dist.get_world_size()} devices", rows, check=not options.no_check
        )
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
