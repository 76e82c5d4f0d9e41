"""The automatic cut of a two-stage pipeline against all other cuts, by steps in eager PyTorch.

Each position that the automatic search considers is tried. All pipelines share one graph, one
module and the connections of the first pipeline, because connecting GPUs takes longer than the
steps do.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.common import Row
from benchmarks.pipeline_common import in_turns, spread, step_seconds
from benchmarks.pipeline_models import blocks_model, cross_entropy
from tvmbridge.distributed import PipelineRunner, Plan, pipeline
from tvmbridge.distributed.plan import every_plan
from tvmbridge.distributed.runner import RunnerSettings

CUTS = ("4 alike", "8 growing", "12 shrinking", "16 alike", "16 mixed")
# A cut is timed again if its fastest of _FIRST_STEPS steps is within _FAR times the fastest cut's,
# or its predicted time within _FAR_PREDICTED times the least: other work may disturb first steps.
_FIRST_STEPS = 4
_FAR = 4 / 3
_FAR_PREDICTED = 1.1


@dataclass(frozen=True)
class Tried:
    """A cut: its plan, a function that runs a step, and the seconds of the fastest first step."""

    plan: Plan
    step: Callable[[], None]
    seconds: float

    @property
    def predicted(self) -> float:
        """Return the seconds of a step that the plan predicts from measurements of the parts."""
        return self.plan.predicted().seconds

    @property
    def begins(self) -> str:
        """Return the name of the submodule that begins the second stage."""
        return self.plan.stages[1].begins


def cut(options: argparse.Namespace) -> Iterator[Row]:
    """Measure, for each model, the step of the automatic cut over the step of the best cut."""
    if dist.get_world_size() != 2:
        _tell("cut: for two ranks")
        return
    for name in options.cuts:
        begun = time.perf_counter()
        yield _of_model(name, options)
        gc.collect()
        _tell(f"  {name}: {time.perf_counter() - begun:.0f} s")


def _of_model(name: str, options: argparse.Namespace) -> Row:
    count = options.microbatches[0]
    module, inputs, targets = blocks_model(name, options.size * count)
    begun = time.perf_counter()
    automatic = pipeline(
        module, inputs, microbatches=count, loss=cross_entropy, tvm=False, check_batches=False,
        timeout=options.timeout,
    )  # fmt: skip
    plans = _plans(automatic)
    _tell(f"  {name}: {len(plans)} cuts, planned in {time.perf_counter() - begun:.1f} s")
    batch = inputs.to(automatic.device), targets.to(automatic.device)
    runners = [automatic, *(_recut(automatic, module, plan) for plan in plans[1:])]
    _tell(f"  {name}: cut after {time.perf_counter() - begun:.1f} s")
    tried = [_tried(runner, batch) for runner in runners]
    near = _near(tried)
    times = in_turns([t.step for t in near], options.rounds)
    medians = [statistics.median(found) for found in times]
    for one, seconds in zip(near, medians, strict=True):
        _tell(f"  {name}: at {one.begins} {1e3 * seconds:.2f} ms, the median")
    automatic.close()
    best = near[medians.index(min(medians))]
    told = (
        f"cut of {name} at {near[0].begins}: over the best of {len(tried)}, at {best.begins} "
        f"(spread {spread(times[0]) / medians[0]:.3f})"
    )
    return Row(told, medians[0] / min(medians), "", 1.05)


def _plans(automatic: PipelineRunner) -> list[Plan]:
    """Return the plans of all cuts, as rank 0 measures the parts; the automatic one is first."""
    runner, found = automatic, list[Plan]()
    if dist.get_rank() == 0:
        found = every_plan(runner.graph, runner.sample, runner.plan, runner.device)
    found = runner.control.share(found)
    others = [p for p in found if p.positions != automatic.plan.positions]
    assert len(others) == len(found) - 1, "the automatic cut is one of them"
    return [automatic.plan, *others]


def _recut(automatic: PipelineRunner, module: torch.nn.Module, plan: Plan) -> PipelineRunner:
    """Return a runner of the same module on the same ranks, with another cut."""
    settings = RunnerSettings(cross_entropy, tvm=False, check_batches=False)
    return PipelineRunner(
        module,
        automatic.graph,
        plan,
        automatic.sample,
        automatic.control,
        automatic.device,
        settings,
    )


def _tried(runner: PipelineRunner, batch: tuple[torch.Tensor, torch.Tensor]) -> Tried:
    """Time the first steps of a cut.

    The result is the slower rank's time, so that both ranks choose the same cuts afterwards.
    """
    step = functools.partial(_train, runner, *batch)
    fastest = min(step_seconds(step, _FIRST_STEPS))
    tried = Tried(runner.plan, step, max(runner.control.gather(fastest, "for its times")))
    times = f"{1e3 * tried.seconds:.2f} ms, predicted {1e3 * tried.predicted:.2f}"
    _tell(f"    at {tried.begins} {times}")
    return tried


def _near(tried: list[Tried]) -> list[Tried]:
    """Return the cuts that may be the best, and always the automatic one, which is the first."""
    measured = _FAR * min(t.seconds for t in tried)
    predicted = _FAR_PREDICTED * min(t.predicted for t in tried)
    return [
        t
        for i, t in enumerate(tried)
        if i == 0 or t.seconds <= measured or t.predicted <= predicted
    ]


def _train(runner: PipelineRunner, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Run a step and drop its gradients."""
    runner.step(inputs, targets)
    runner.zero_grad()


def _tell(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)
