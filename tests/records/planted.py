"""A small module, its tuning task, and folders with records written by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tvm.s_tir import Schedule
from tvm.target import Target

from tvmbridge.core.options import CompileOptions
from tvmbridge.records import Folder, Task
from tvmbridge.records.folder import Record, Verdict
from tvmbridge.records.meta import target_json
from tvmbridge.schedules.target import host_target
from tvmbridge.tuning.api import module_tasks

Steps = Callable[[Schedule], None]
SHAPE = (8, 48)


def other_processor() -> str:
    """Return the name of a processor that LLVM knows and that this machine does not have."""
    return "znver4" if str(host_target().attrs["mcpu"]) == "znver5" else "znver5"


class Softmax(nn.Module):
    """A module that becomes one fused function with intermediate values, without a product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, dim=-1)


def sample() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


def softmax_task() -> Task:
    tasks, _, _ = module_tasks(
        Softmax().eval(), (sample(),), {}, target=None, options=CompileOptions()
    )
    (task,) = tasks
    return task


def right(schedule: Schedule) -> None:
    """Apply a right schedule: the outermost loop of the last block becomes parallel."""
    block = schedule.get_sblock("T_softmax", func_name="main")
    schedule.parallel(schedule.get_loops(block)[0])


def wrong(schedule: Schedule) -> None:
    """Apply a wrong schedule: exponentials of a row overwrite each other in two elements."""
    block = schedule.get_sblock("T_exp", func_name="main")
    schedule.transform_layout(
        block, ("write", 0), lambda i, j: (i, j % 2), assume_injective_transform=True
    )


def record_of(task: Task, steps: Steps, seconds: float, target: Target | None = None) -> Record:
    schedule = Schedule(task.mod)
    steps(schedule)
    trace = json.loads(json.dumps(_plain(schedule.trace.as_json())))
    return Record((trace, [seconds], target_json(target or host_target()), []))


def _plain(value: Any) -> Any:
    if hasattr(value, "value"):
        return value.value
    if isinstance(value, str | int | float) or value is None:
        return value
    return [_plain(item) for item in value]


def plant(
    log_dir: Path, task: Task, steps: Steps = right, *, seconds: float = 1e-6, rule: float = 2e-6
) -> Folder:
    """Write a folder with one record and its verdict.

    The verdict says that the record took ``seconds``, and the schedule by tvmbridge's rules took
    ``rule`` seconds.
    """
    folder = Folder.below(log_dir, host_target())
    folder.open_for_writing()
    index, key = folder.add_task(task)
    record = record_of(task, steps, seconds)
    folder.add_records(index, [record])
    folder.add_verdict(Verdict(key, 1, rule, record.digest, seconds))
    return folder
