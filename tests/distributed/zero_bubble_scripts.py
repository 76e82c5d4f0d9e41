"""Stages of PyTorch's engine under schedules without bubbles, and the same steps in one process."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from tests.distributed.models import Block
from tvmbridge import CompileOptions, add_tvm_dispatch, dispatch_report
from tvmbridge.distributed import ZeroBubbleStage

WIDTH, STEPS = 16, 2
STRAIGHT, V_SHAPED = ("InterleavedZeroBubble",), ("ZBVZeroBubble", "DualPipeV")
SCHEDULES = (*STRAIGHT, *V_SHAPED)
Found = dict[str, Any]


def batch(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2 * microbatches, 3, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randn(x.shape, generator=generator, dtype=torch.float64)


def block(stage: int) -> Block:
    """Return the module of one stage, with the same weights in each process."""
    torch.manual_seed(stage)
    return Block(WIDTH).double()


def sgd(modules: Sequence[nn.Module]) -> torch.optim.Optimizer:
    parameters = [p for module in modules for p in module.parameters()]
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def states(modules: Sequence[nn.Module]) -> list[dict[str, torch.Tensor]]:
    return [{n: p.detach().clone() for n, p in m.named_parameters()} for m in modules]


def by_one_process(stages: int, microbatches: int) -> tuple[torch.Tensor, list[Any]]:
    """Train the eager stages in one process; return the losses and the states of the stages."""
    modules = [block(stage) for stage in range(stages)]
    optimizer, (inputs, targets) = sgd(modules), batch(microbatches)
    losses = []
    for _ in range(STEPS):
        for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            loss = nn.functional.mse_loss(nn.Sequential(*modules)(x), y)
            (loss / microbatches).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), states(modules)


def train(rank: int, ranks: int, microbatches: int) -> dict[str, Found]:
    """Train two dispatched stages on this rank by each schedule; return what each one found."""
    if ranks == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    modules = [block(0), block(0)]
    sample = torch.zeros(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    options = CompileOptions(only_if_faster=False)
    for module in modules:
        add_tvm_dispatch(module, (sample,), options=options)
    found = {}
    for name in SCHEDULES:
        # PyTorch's own stages once, and once the stages that free residuals early.
        kind = PipelineStage if name == "ZBVZeroBubble" else ZeroBubbleStage
        own = (rank, rank + ranks) if name in STRAIGHT else (rank, 2 * ranks - 1 - rank)
        for module, index in zip(modules, own, strict=True):
            module.load_state_dict(block(index).state_dict())
        # With these samples the engine does not run the modules to find out their shapes.
        shapes = (sample.detach().to("meta").requires_grad_(),)
        stages = [
            kind(module, index, 2 * ranks, sample.device, input_args=shapes, output_args=shapes)
            for module, index in zip(modules, own, strict=True)
        ]
        found[name] = _trained(getattr(schedules, f"Schedule{name}"), stages, microbatches)
    return found


def _trained(schedule: Any, stages: Sequence[PipelineStage], microbatches: int) -> Found:
    modules = [stage.submod for stage in stages]
    before = [_counted(module) for module in modules]
    made = schedule(list(stages), microbatches, loss_fn=nn.functional.mse_loss)
    optimizer, (inputs, targets) = sgd(modules), batch(microbatches)
    losses: list[torch.Tensor] = []
    for _ in range(STEPS):
        arguments = (inputs,) if any(s.is_first for s in stages) else ()
        step_losses: list[torch.Tensor] = []
        last = any(s.is_last for s in stages)
        made.step(*arguments, target=targets if last else None, losses=step_losses)
        losses += [loss.detach() for loss in step_losses]
        optimizer.step()
        optimizer.zero_grad()
    # Each stage's work by the schedule's order: forward, whole backward, and the two halves.
    order = made.pipeline_order_with_comms[made.rank]
    return {
        "stages": [stage.stage_index for stage in stages],
        "losses": torch.stack(losses) if losses else None,
        "states": states(modules),
        "counted": [_counted(m) - b for m, b in zip(modules, before, strict=True)],
        "fallbacks": [dispatch_report(module).fallbacks for module in modules],
        "planned": [_planned(order, stage.stage_index) for stage in stages],
    }


def _counted(module: nn.Module) -> Counter[str]:
    """Return how often compiled forward and each half of backward ran."""
    report = dispatch_report(module)
    halves = (Counter(s.backward_halves) for s in report.specializations)
    return sum(halves, Counter(forward=report.tvm_calls))


def _planned(order: Sequence[Any], stage: int) -> Counter[str]:
    """Return how often the schedule runs each kind of work of ``stage`` in all steps."""
    leaves = [leaf for action in order if action for leaf in (action.sub_actions or (action,))]
    kinds = (re.sub(r"\d", "", str(leaf)) for leaf in leaves if leaf.stage_index == stage)
    return Counter({kind: STEPS * count for kind, count in Counter(kinds).items()})
