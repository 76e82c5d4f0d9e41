"""Functions that the ranks of the tests run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.models import Images, Language, cross_entropy, tokens
from tvmbridge.distributed import pipeline


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(rank: int, settings: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """Train the language model; return losses, weights, and entries of the report."""
    torch.manual_seed(0)
    settings = dict(settings)
    clip = settings.pop("clip", None)
    model = Language(tied=settings.pop("tied", False), dropout=settings.pop("dropout", 0.0))
    model = model.double().train()
    inputs, targets = tokens()
    runner = pipeline(model, inputs, microbatches=4, loss=cross_entropy, timeout=60, **settings)
    optimizer = sgd(runner.parameters())
    losses = []
    for _ in range(steps):
        losses.append(runner.step(inputs, targets))
        norm = None if clip is None else runner.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
    report, state = runner.report(), runner.full_state_dict()
    runner.close()
    return {
        "losses": torch.cat(losses),
        "state": state,
        "norm": norm,
        "eager": {s.stage: s.eager for s in report.stages},
        "equal_to": {s.stage: s.equal_to for s in report.stages},
        "share": report.share,
        "halves": {s.stage: s.halves for s in report.stages},
        "tied": runner.plan.tied,
        "own": list(runner.state_dict()),
    }


def train_images(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train a model with batch norm; return losses, and state with the running statistics."""
    torch.manual_seed(0)
    model = Images().double().train()
    inputs, targets = images()
    runner = pipeline(model, inputs, microbatches=4, loss=cross_entropy, timeout=60, **settings)
    optimizer = sgd(runner.parameters())
    losses = []
    for _ in range(3):
        losses.append(runner.step(inputs, targets))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": torch.cat(losses), "state": runner.full_state_dict()}


def images() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(8, 3, 6, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 5, (8,), generator=generator)


class Failing(nn.Module):
    """A module that replaces a stage of one rank, and raises, kills its process, or sleeps."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def __call__(self, *args: Any) -> Any:
        if self.how == "raises":
            raise ValueError("the disk is full")
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(14)


def fail(
    rank: int,
    how: str,
    at_rank: int,
    timeout: float,
    schedule: str = "simple",
    blocks: int = 4,
    stages: Sequence[str] | None = None,
) -> float:
    """Run a step that works, then a step in which a stage of the rank ``at_rank`` fails.

    Args:
        rank: this process's rank.
        how: ``"raises"``, ``"killed"`` or ``"sleeps"``.
        at_rank: the rank that fails.
        timeout: the pipeline's timeout in seconds.
        schedule, blocks, stages: of the pipeline.

    Returns:
        The seconds of the second step; its error has them too.
    """
    inputs, targets = tokens()
    model = Language(blocks).train()
    runner = pipeline(
        model, inputs, microbatches=4, loss=cross_entropy, timeout=timeout, tvm=False,
        schedule=schedule, stages=stages,
    )  # fmt: skip
    runner.step(inputs, targets)
    if rank == at_rank:
        for stage in runner._engine_stages:
            stage.runs.module = Failing(how)
    begun = time.monotonic()
    try:
        runner.step(inputs, targets)
    except Exception as error:
        raise type(error)(f"{error} [{time.monotonic() - begun:.1f} s]") from error
    return time.monotonic() - begun


class NoGradient(torch.autograd.Function):
    """An identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no gradient today")


class WithoutGradient(nn.Module):
    """A stage whose backward raises, from the micro-batch ``first`` on."""

    def __init__(self, stage: Any, first: int) -> None:
        super().__init__()
        self.module = stage.module
        self.stage = [stage]
        self.first = first

    def forward(self, *args: Any) -> tuple[torch.Tensor, ...]:
        made: tuple[torch.Tensor, ...] = self.module(*args)
        if self.stage[0].microbatch < self.first:
            return made
        return tuple(NoGradient.apply(x) for x in made)


def eager_runner(**settings: Any) -> Any:
    """Return a pipeline in eager PyTorch after a successful step, and its batch."""
    inputs, targets = tokens()
    runner = pipeline(
        Language().train(), inputs, microbatches=4, loss=cross_entropy, timeout=30, tvm=False,
        **settings,
    )  # fmt: skip
    runner.step(inputs, targets)
    return runner, inputs, targets


def fail_backward(rank: int, first: int, schedule: str = "interleaved") -> None:
    """Run a step in which the first stage's backward raises, from the micro-batch ``first`` on."""
    runner, inputs, targets = eager_runner(schedule=schedule)
    if rank == 0:
        stage = runner._engine_stages[0]
        stage.runs.module = WithoutGradient(stage.runs, first)
    runner.step(inputs, targets)


def step_after_failure(rank: int) -> None:
    """Run another step after a step that failed."""
    runner, inputs, targets = eager_runner(schedule="simple")
    if rank == 1:
        runner._engine_stages[0].runs.module = Failing("raises")
        # The other rank must find the connection closed.
        runner.control.timeout = 5
    try:
        runner.step(inputs, targets)
    except Exception:
        if rank == 1:
            dist.destroy_process_group()
    runner.step(inputs, targets)


def other_module(rank: int) -> None:
    """Build a pipeline whose second rank has more blocks."""
    inputs, _ = tokens()
    pipeline(
        Language(blocks=4 + rank).train(), inputs, microbatches=4, loss=cross_entropy, timeout=30
    )


def other_batch(rank: int) -> None:
    """Run a step for which the second rank has another batch."""
    inputs, targets = tokens()
    runner = pipeline(
        Language().train(), inputs, microbatches=4, loss=cross_entropy, timeout=30, tvm=False
    )
    runner.step(inputs, targets)
    runner.step(inputs, targets.flip(0) if rank else targets)


def indivisible(rank: int) -> None:
    """Run a step with a batch of 6 in a pipeline with 4 micro-batches."""
    inputs, targets = tokens()
    runner = pipeline(
        Language().train(), inputs, microbatches=4, loss=cross_entropy, timeout=30, tvm=False
    )
    runner.step(inputs[:6], targets[:6])


def absent(rank: int, joins: bool) -> None:
    """Build a pipeline that the second rank does not join.

    With ``joins`` the second rank joins the process group alone.
    """
    if rank and not joins:
        time.sleep(8)
        return
    if joins:
        dist.init_process_group("gloo")
        if rank:
            time.sleep(8)
            return
    inputs, _ = tokens()
    pipeline(Language().train(), inputs, microbatches=4, loss=cross_entropy, timeout=3)


def refused(rank: int) -> dict[int, str | None]:
    """Train while TVM refuses one stage on one rank; return the reasons by stage."""
    from tvmbridge.core.errors import UnsupportedOperatorError
    from tvmbridge.distributed import compiling

    genuine = compiling.add_tvm_dispatch

    def refuses(module: Any, *args: Any, **kwargs: Any) -> Any:
        if any(p.shape[0] == 2 * 16 for p in module.parameters()) and rank == 1:
            raise UnsupportedOperatorError("there is no rule for aten.tanh")
        return genuine(module, *args, **kwargs)

    compiling.add_tvm_dispatch = refuses
    found = train(rank, {"stages": ["blocks.0", "blocks.1", "blocks.2"], "schedule": "simple"}, 1)
    return found["eager"]


def equal_stages(rank: int, folder: str) -> dict[str, Any]:
    """Train with stages of one block, of which the middle two are equal, and an on-disk cache."""
    os.environ.update(TVMBRIDGE_CACHE="1", TVMBRIDGE_CACHE_DIR=folder)
    torch.manual_seed(0)
    inputs, targets = tokens()
    runner = pipeline(
        Language().train(), inputs, microbatches=4, loss=cross_entropy, timeout=60,
        stages=["blocks.1", "blocks.2", "blocks.3"],
    )  # fmt: skip
    runner.step(inputs, targets)
    report = runner.report()
    return {
        "equal_to": {s.stage: s.equal_to for s in report.stages},
        "cache": {s.stage: s.cache for s in report.stages},
    }


def group_count() -> int:
    """Return the number of live process groups; PyTorch's own function counts destroyed ones."""
    return len(dist.distributed_c10d._world.pg_map)


def closed(rank: int) -> list[int]:
    """Build and close three pipelines; return the number of process groups after each."""
    model, (inputs, targets) = Language().double().train(), tokens()
    found = []
    for _ in range(3):
        runner = pipeline(
            model, inputs, microbatches=4, loss=cross_entropy, timeout=30, tvm=False,
            stages=["blocks.2"],
        )  # fmt: skip
        runner.step(inputs, targets)
        runner.close()
        runner.close()
        found.append(group_count())
    return found


def closed_by_one(rank: int) -> None:
    """Run a step on the second rank while the first closes the pipeline."""
    runner, inputs, targets = eager_runner()
    if rank == 0:
        runner.control.timeout = 3
        runner.close()
    runner.step(inputs, targets)
