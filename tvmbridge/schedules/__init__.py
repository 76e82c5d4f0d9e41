"""Schedule fused functions by rule, if they have no tuning record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import IRModule
from tvm.s_tir import SBlock, SBlockRealize
from tvm.target import Target
from tvm_ffi import StructuralKey

from tvmbridge.core.decisions import remembered, sizes_vary
from tvmbridge.schedules.bool_buffers import kept_as_bytes
from tvmbridge.schedules.columns_emit import emit_columns
from tvmbridge.schedules.indexing import Indexer, integer
from tvmbridge.schedules.kernel import Kernel, parse
from tvmbridge.schedules.long_rows_emit import emit_long_rows
from tvmbridge.schedules.loops import sequence
from tvmbridge.schedules.machine import Machine
from tvmbridge.schedules.plan import Nest, plan, shared_buffers
from tvmbridge.schedules.rows import RowNest
from tvmbridge.schedules.rows_emit import RowEmitter
from tvmbridge.schedules.tiles import TileNest, emit_tiles
from tvmbridge.schedules.values import Memory, TooLargeError
from tvmbridge.schedules.varying_products import is_product, schedule_product

_SCHEDULED = "tirx.is_scheduled"
_MARKS = (_SCHEDULED, "tir.is_scheduled")


def schedule_function(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
    """Return ``func`` with new loops, or None if no rule here fits its form."""
    machine = Machine.of(target)
    # While sizes vary, the decisions of a function are recorded with it.
    return _scheduled(func, machine) if sizes_vary() else _known(StructuralKey(func), machine)


@lru_cache(maxsize=512)
def _known(func: StructuralKey, machine: Machine) -> tirx.PrimFunc | None:
    """Schedule a function; modules of equal layers, and forward and backward, have equal ones."""
    return _scheduled(func.key, machine)


def _scheduled(func: tirx.PrimFunc, machine: Machine) -> tirx.PrimFunc | None:
    if is_product(func):
        return marked_scheduled(schedule_product(func, machine))
    kernel, memory = parse(func), Memory()
    if kernel is None or is_reshape(kernel):
        return None

    def loops_of(nest: Nest, shared: set[Any]) -> list[tirx.Stmt]:
        if isinstance(nest, RowNest):
            return RowEmitter(nest, machine, shared, memory).emit()
        if isinstance(nest, TileNest):
            return emit_tiles(nest, machine, memory)
        emit = emit_columns if nest.columns > 1 else emit_long_rows
        return emit(nest, machine, memory)

    return with_loops(func, kernel, plan(kernel, machine), memory, loops_of)


def with_loops(
    func: tirx.PrimFunc,
    kernel: Kernel,
    nests: list[Nest],
    memory: Memory,
    loops_of: Callable[[Nest, set[Any]], list[tirx.Stmt]],
) -> tirx.PrimFunc | None:
    """Return ``func`` with the statements that ``loops_of`` returns for each loop nest.

    ``loops_of`` gets a nest and the buffers that several nests use. Return None if an expression
    grows too large.
    """
    shared = shared_buffers(kernel, nests)
    for stage in kernel.stages:
        if stage.buffer in shared and stage.buffer not in kernel.outputs:
            memory.allocate(stage.buffer)
    statements = list(memory.allocations)
    try:
        for nest in nests:
            statements += loops_of(nest, shared)
    except TooLargeError:
        return None
    body = sequence(statements)
    if any(stage.dtype == "bool" for stage in kernel.stages):
        body = kept_as_bytes(body)
    # Passes over Relax modules expect functions to have a root block.
    root = SBlock([], [], [], "root", body)
    return marked_scheduled(func.with_body(SBlockRealize([], True, root)))


def is_reshape(kernel: Kernel) -> bool:
    """Whether a function copies a tensor in order: later passes turn calls of it into views."""
    stage = kernel.stages[0]
    if (
        len(kernel.stages) > 1
        or len(stage.loads) != 1
        or not stage.value.same_as(stage.loads[0].slot)
        # A read of half precision is a float32 value.
        or str(stage.loads[0].buffer.dtype) != str(stage.buffer.dtype)
    ):
        return False
    indexer = Indexer({axis.var: axis.extent for axis in stage.axes})
    read = indexer.flat(stage.loads[0].buffer, stage.loads[0].indices)
    here = [var if var is not None else integer(0) for var in stage.dims]
    return tvm_ffi.structural_equal(read, indexer.flat(stage.buffer, here))


def is_one_nest(kernel: Kernel, target: Target) -> bool:
    """Whether scheduling a function would give a single loop nest that reads its rows once."""
    if is_reshape(kernel):
        return False
    nests = plan(kernel, Machine.of(target))
    return len(nests) == 1 and not isinstance(nests[0], TileNest)


def is_scheduled(func: tirx.PrimFunc) -> bool:
    """Whether a function has an attribute that says it is scheduled."""
    return any(mark in func.attrs for mark in _MARKS)


def marked_scheduled(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return ``func`` with the attribute that says it is scheduled."""
    return func.with_attr(_SCHEDULED, True)


def scheduled_function(parameters: Sequence[tirx.Buffer], body: tirx.Stmt) -> tirx.PrimFunc:
    """Return a scheduled function with ``body``, whose buffers share no memory."""
    root = SBlockRealize([], True, SBlock([], [], [], "root", body))
    function = tirx.PrimFunc(list(parameters), root)
    return marked_scheduled(function.with_attrs({"tirx.noalias": True, "s_tir": True}))


def schedule_for_cpu(mod: IRModule, target: Target) -> IRModule:
    """Return ``mod`` with every function of fused tensor expressions scheduled for ``target``.

    Functions that are scheduled already, are not TIR, or fit no rule are left unchanged.
    """
    updates = {}
    for name, func in mod.functions_items():
        if not isinstance(func, tirx.PrimFunc) or is_scheduled(func):
            continue
        scheduled = remembered(name.name_hint, partial(schedule_function, func, target))
        if scheduled is not None:
            updates[name] = scheduled
    return IRModule({**dict(mod.functions_items()), **updates}, attrs=mod.attrs)


def cpu_schedule_pass(target: Target) -> tvm.ir.transform.Pass:
    """Return :func:`schedule_for_cpu` as a pass, for use in a Sequential."""

    @tvm.ir.transform.module_pass(opt_level=0, name="ScheduleForCPU")
    def schedule(mod: IRModule, _: tvm.ir.transform.PassContext) -> IRModule:
        return schedule_for_cpu(mod, target)

    return schedule


__all__ = [
    "cpu_schedule_pass",
    "is_one_nest",
    "is_reshape",
    "is_scheduled",
    "marked_scheduled",
    "schedule_for_cpu",
    "schedule_function",
    "scheduled_function",
]
