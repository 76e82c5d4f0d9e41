"""Merge two TIR functions into one, which runs the loops of the first and then of the second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize

from tvmbridge.schedules.kernel import Kernel, KernelStage


def merged(
    first: tirx.PrimFunc, second: tirx.PrimFunc, given: Sequence[int], kept: Sequence[int]
) -> tirx.PrimFunc:
    """Merge two TIR functions into one.

    Args:
        given: for each input of ``second``, the number of the parameter of ``first`` that it is;
            numbers from the count of these parameters on are further inputs.
        kept: numbers of the results of ``first`` that the merged function returns; the others
            become temporary buffers.

    Returns:
        The function; its parameters are the inputs of ``first``, the further inputs of ``second``,
        the kept results of ``first``, and the results of ``second``.
    """
    first = renamed(first)
    params, names = list(first.params), {}
    for place, param in zip(given, second.params, strict=False):
        if place == len(params):
            params.append(tirx.Var(param.name, param.ty))
        names[param] = params[place]
    second = _renamed(second, names)
    inputs = len(first.params) - _result_count(first)
    results = params[inputs : len(first.params)]
    dropped = [result for place, result in enumerate(results) if place not in kept]
    root, other = first.body.block, second.body.block
    body = tirx.SeqStmt([*_statements(root), *_statements(other)])
    buffers = [*root.alloc_buffers, *dropped, *other.alloc_buffers]
    block = SBlock([], [], [], "root", body, None, buffers)
    return tirx.PrimFunc(
        [
            *params[:inputs],
            *params[len(first.params) :],
            *(results[place] for place in kept),
            *second.params[len(given) :],
        ],
        SBlockRealize([], True, block),
        first.ret_type,
        first.attrs,
    )


def merged_kernel(
    first: Kernel, second: Kernel, given: Sequence[int], kept: Sequence[int]
) -> Kernel:
    """Return what parsing the merged function would return, with the variables of the two kernels.

    ``given`` and ``kept`` are those of :func:`merged`. The kernels must share no variable.
    """
    params, inputs = list(first.params), len(first.params) - len(first.outputs)
    for place, param in zip(given, second.params, strict=False):
        if place == len(params):
            params.append(param)
    same = {old: params[place] for place, old in zip(given, second.params, strict=False)}
    results = [params[inputs + place] for place in kept]
    own = second.params[len(given) :]
    return Kernel(
        (*params[:inputs], *params[len(first.params) :], *results, *own),
        [*first.stages, *(_reading(stage, same) for stage in second.stages)],
        {*results, *own},
    )


def share_variables(first: Kernel, second: Kernel) -> bool:
    """Whether two kernels have a parameter, a buffer or an axis in common."""
    return not _variables(first).isdisjoint(_variables(second))


def renamed(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return ``func`` with new variables."""
    return _renamed(func, {})


def _variables(kernel: Kernel) -> set[Any]:
    axes = {axis.var for stage in kernel.stages for axis in stage.axes}
    return {*kernel.params, *axes, *(stage.buffer for stage in kernel.stages)}


def _reading(stage: KernelStage, same: dict[Any, Any]) -> KernelStage:
    """Return ``stage`` with other buffers to read: ``same`` has them by the present ones."""
    loads = [replace(load, buffer=same.get(load.buffer, load.buffer)) for load in stage.loads]
    return replace(stage, loads=tuple(loads))


def _result_count(func: tirx.PrimFunc) -> int:
    written = {store.buffer for store in _stores(func)}
    return sum(param in written for param in func.params)


def _stores(func: tirx.PrimFunc) -> list[Any]:
    found: list[Any] = []
    tvm_ffi.structural_walk(func.body, (tirx.BufferStore, found.append))
    return found


def _statements(block: SBlock) -> list[tirx.Stmt]:
    return list(block.body.seq) if isinstance(block.body, tirx.SeqStmt) else [block.body]


def _renamed(func: tirx.PrimFunc, names: dict[Any, Any]) -> tirx.PrimFunc:
    """Return ``func`` with each variable replaced: by ``names``, or by a new one, added there."""

    def rename(var: tirx.Var, _: Any) -> tirx.Var:
        found = names.get(var)
        if found is None:
            found = names[var] = tirx.Var(var.name, var.ty)
        return found

    return tvm_ffi.structural_mutate(func, (tirx.Var, rename))
