"""Collect the tuning tasks of a module: the functions that compilation would schedule."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from torch import nn
from tvm.target import Target

from tvmbridge.calls.standins import anything_requires_grad
from tvmbridge.compiler.build import fuse
from tvmbridge.compiler.durations import StageDurations
from tvmbridge.compiler.laying_out import lay_out_functions
from tvmbridge.compiler.lowering import lower_module
from tvmbridge.compiler.packing import ModulePacks
from tvmbridge.compiler.request import CompileRequest
from tvmbridge.core.options import CompileOptions
from tvmbridge.core.types import PassRecord
from tvmbridge.graph_capture.surroundings import tracing_here
from tvmbridge.records import Task, count_tasks
from tvmbridge.records.tasks import count_calls
from tvmbridge.runtime.dispatcher import code_of
from tvmbridge.runtime.guards.forwards import with_own_forward
from tvmbridge.runtime.module_code import ModuleCode


def module_tasks(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    target: Any,
    options: CompileOptions,
) -> tuple[dict[Task, int], int, Target]:
    """Return a module's tasks with their numbers of calls, its external calls, and the target.

    Tasks are from forward and backward if the module is in train mode and anything requires a
    gradient; otherwise from forward alone.
    """
    needs_grad = module.training and anything_requires_grad(module, (args, dict(kwargs)))
    records: list[PassRecord] = []
    installed = module.__dict__.get("forward")
    code = code_of(installed, ModuleCode)
    packing = ModulePacks(module) if code is None else code.packing
    own_forward = nullcontext() if code is None else with_own_forward(module, code.original)
    with tracing_here(), own_forward:
        lowered = lower_module(
            CompileRequest(
                module,
                args,
                kwargs,
                needs_grad=needs_grad,
                target=target,
                options=options,
                packing=packing,
            ),
            records=records,
            measure=StageDurations().measure,
        )
    mod, _ = lay_out_functions(lowered.mod, lowered.split, lowered.layouts, records)
    mod = fuse(mod, lowered.target, records, measure=options.measure_kernels)
    return count_tasks(mod), count_calls(mod)[""], lowered.target
