"""Schedule fused functions for GPUs: each loop nest of a function becomes one kernel."""

from __future__ import annotations

import struct
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, IRModule
from tvm.s_tir import dlight
from tvm.target import Target

from tvmbridge.schedules import is_reshape, is_scheduled, with_loops
from tvmbridge.schedules.bfloat16 import rounded_by_cuda
from tvmbridge.schedules.gpu.elementwise import emit_elementwise, emit_transpose
from tvmbridge.schedules.gpu.reductions import emit_gpu_reduction
from tvmbridge.schedules.gpu.rows import GpuRowEmitter, fits_registers
from tvmbridge.schedules.gpu.tails import with_tails
from tvmbridge.schedules.kernel import Kernel, parse
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.plan import Nest, plan
from tvmbridge.schedules.reductions import ReductionNest
from tvmbridge.schedules.rows import RowNest
from tvmbridge.schedules.tiles import TileNest
from tvmbridge.schedules.values import Memory

# A GPU as the planner sees it: no vector lanes, and 132 multiprocessors (an H100's) as cores.
_MACHINE = Machine(lanes=1, cores=132, cheap_without_reductions=100, longest_row=8192)


def schedule_for_gpu(mod: IRModule, target: Target) -> IRModule:
    """Return ``mod`` with every TIR function scheduled for a GPU.

    Functions that fit no rule here are scheduled by TVM's dlight. Functions that are scheduled
    already are left unchanged.
    """
    updates = {}
    rest = {}
    for name, func in mod.functions_items():
        if not isinstance(func, tirx.PrimFunc) or is_scheduled(func):
            continue
        with rounded_by_cuda(target.kind.name == "cuda"):
            scheduled = schedule_function(func)
        if scheduled is not None:
            updates[name] = scheduled
        else:
            rest[name] = func
    if rest:
        with target:
            by_rule = dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(IRModule(rest))
        updates |= {name: by_rule[name.name_hint] for name in rest}
    if target.kind.name == "cuda":
        updates = {name: exact_doubles(func) for name, func in updates.items()}
    return IRModule({**dict(mod.functions_items()), **updates}, attrs=mod.attrs)


def schedule_function(func: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """Return ``func`` as GPU kernels, or None if no rule here fits its form."""
    kernel = parse(func)
    if kernel is None:
        return None
    memory = Memory(cells="local")

    def loops_of(nest: Nest, shared: set[Any]) -> list[tirx.Stmt]:
        if isinstance(nest, TileNest):
            return emit_transpose(nest, memory)
        if isinstance(nest, ReductionNest):
            return emit_gpu_reduction(nest, _MACHINE, memory)
        if nest.is_elementwise:
            return emit_elementwise(nest, shared, memory)
        return GpuRowEmitter(nest, shared, memory).emit()

    nests = with_tails(kernel, plan(kernel, _MACHINE))
    return with_loops(func, kernel, nests, memory, loops_of)


def is_one_kernel(kernel: Kernel, parts: tuple[Kernel, ...], _: Target) -> bool:
    """Whether scheduling a function gives one kernel, in which its parts lose no threads.

    Rows with reductions keep their number, and elementwise functions get one thread for each
    element, so that a merged kernel fills a GPU like its parts.

    Args:
        parts: the functions that ``kernel`` is made of; empty if it was not merged.
    """
    nest = _only_nest(kernel)
    if nest is None or not parts:
        return nest is not None
    if isinstance(nest, ReductionNest):
        return nest.tail is not None
    if nest.is_elementwise:
        return True
    others = [_only_nest(part) for part in parts]
    if any(isinstance(other, ReductionNest) for other in others):
        return False
    rows = {o.rows for o in others if isinstance(o, RowNest) and not o.is_elementwise}
    return rows == {nest.rows} and fits_registers(nest)


def _only_nest(kernel: Kernel) -> RowNest | ReductionNest | None:
    """Return the only loop nest of a function, unless it is a transpose or a reshape."""
    if is_reshape(kernel):
        return None
    nests = with_tails(kernel, plan(kernel, _MACHINE))
    return nests[0] if len(nests) == 1 and not isinstance(nests[0], TileNest) else None


__all__ = ["is_one_kernel", "schedule_for_gpu", "schedule_function"]


def exact_doubles(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return ``func`` with the bits of each float64 constant that would be printed inexactly."""
    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.FloatImm, _exact)))


def _exact(constant: tirx.FloatImm) -> Expr:
    value = float(constant.value)
    if str(constant.ty.dtype) != "float64" or float(f"{value:.15f}") == value:
        return constant
    (bits,) = struct.unpack("q", struct.pack("d", value))
    return tirx.reinterpret("float64", tirx.IntImm("int64", bits))
