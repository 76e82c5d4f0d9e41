"""Schedules for fused functions without a tuning record."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.ir import IRModule
from tvm.target import Target

from tvmbridge.schedules.kernel import parse
from tvmbridge.schedules.loops import sequence
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.plan import plan, shared_buffers
from tvmbridge.schedules.reductions import emit_columns, emit_long_rows
from tvmbridge.schedules.rows import RowNest
from tvmbridge.schedules.rows_emit import emit_rows
from tvmbridge.schedules.values import Memory

_SCHEDULED = "tirx.is_scheduled"
_MARKS = (_SCHEDULED, "tir.is_scheduled")


def schedule_function(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
    """Return ``func`` with new loops, or None if it is of a form that no rule here knows."""
    kernel = parse(func)
    if kernel is None:
        return None
    machine = Machine.of(target)
    nests = plan(kernel, machine)
    shared = shared_buffers(kernel, nests)
    memory = Memory()
    for stage in kernel.stages:
        if stage.buffer in shared and stage.buffer not in kernel.outputs:
            memory.allocate(stage.buffer)
    loops = []
    for nest in nests:
        if isinstance(nest, RowNest):
            loops += emit_rows(nest, machine, shared, memory)
        elif nest.columns > 1:
            loops += emit_columns(nest, machine, memory)
        else:
            loops += emit_long_rows(nest, machine, memory)
    return func.with_body(sequence([*memory.allocations, *loops])).with_attr(_SCHEDULED, True)


def schedule_for_cpu(mod: IRModule, target: Target) -> IRModule:
    """Return ``mod`` with every function of fused tensor expressions scheduled for ``target``.

    Functions that say they are scheduled, that are not TIR, or that are of another form are left alone.
    """
    updates = {}
    for name, func in mod.functions_items():
        if not isinstance(func, tirx.PrimFunc) or any(mark in func.attrs for mark in _MARKS):
            continue
        scheduled = schedule_function(func, target)
        if scheduled is not None:
            updates[name] = scheduled
    return IRModule({**dict(mod.functions_items()), **updates}, attrs=mod.attrs)


__all__ = ["schedule_for_cpu", "schedule_function"]
