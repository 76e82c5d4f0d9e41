"""The training of a pipeline against the training of one process on the same micro-batches."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common import Row
from benchmarks.pipeline_common import made
from benchmarks.pipeline_models import cross_entropy, model_of

STEPS = 20
BOUNDS = {"float64": 1e-12, "float32": 1e-5}
# The trained MiniLM diverges at _RATE, also without a pipeline: after 20 steps float32 is 5e-3
# from float64. At 1e-3 the difference is 3e-7.
_RATES = {"minilm": 1e-3}
_RATE = 1e-2


def equal(options: argparse.Namespace) -> Iterator[Row]:
    """Compare losses and weights after 20 steps with one process on the same micro-batches."""
    for name in options.models:
        for kind in options.dtypes:
            dtype = getattr(torch, kind)
            for schedule in options.schedules:
                for stages in _stage_counts(options):
                    worst = _difference(name, dtype, schedule, stages, options)
                    title = f"{name}, {stages} stages, {schedule}, {kind}"
                    yield Row(f"{title}: losses and weights", worst, "relative", BOUNDS[kind])


def _difference(
    name: str, dtype: torch.dtype, schedule: str, stages: int, options: argparse.Namespace
) -> float:
    count = options.microbatches[0]
    settings = {"microbatches": count, "schedule": schedule, "stages": stages}
    runner, inputs, targets = made(options, name, dtype, 2 * count, **settings)
    optimizer = _optimizer(name, runner.parameters())
    losses = []
    for _ in range(STEPS):
        losses.append(runner.step(inputs, targets))
        optimizer.step()
        optimizer.zero_grad()
    state = runner.full_state_dict()
    runner.close()
    expected, weights = _reference(name, dtype, count, runner.device)
    found = torch.cat(losses)
    errors = [((found - expected).abs() / expected.abs()).max()]
    for key, tensor in weights.items():
        if tensor.is_floating_point():
            scale = float(tensor.abs().max()) or 1.0
            errors.append((state[key] - tensor).abs().max() / scale)
    # Python's max() could drop a NaN.
    return float(torch.stack([e.double() for e in errors]).max())


def _optimizer(name: str, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum.

    Adam would divide a gradient by its own magnitude, which amplifies rounding errors.
    """
    return torch.optim.SGD(parameters, lr=_RATES.get(name, _RATE), momentum=0.9)


def _reference(
    name: str, dtype: torch.dtype, count: int, device: torch.device
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    module, inputs, targets = model_of(name, dtype, 2 * count)
    module.to(device)
    optimizer = _optimizer(name, module.parameters())
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
