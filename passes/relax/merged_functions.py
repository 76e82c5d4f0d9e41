"""Two functions of loops as one, which does what the one does and then what the other does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize


def merged(
    first: tirx.PrimFunc, second: tirx.PrimFunc, given: Sequence[int], kept: Sequence[int]
) -> tirx.PrimFunc:
    """The function of both: what they read, the kept results of ``first``, those of ``second``.

    Args:
        given: for each input of ``second``, which parameter of ``first`` it is; numbers from their
            count on are further inputs.
        kept: which results of ``first`` are results; the others are seen by nobody else.
    """
    first, second = _renamed(first, {}), _renamed(second, {})
    params = list(first.params)
    for place, param in zip(given, second.params, strict=False):
        if place == len(params):
            params.append(param)
    same = {old: params[place] for place, old in zip(given, second.params, strict=False)}
    second = _renamed(second, same)
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


def stage_count(func: tirx.PrimFunc) -> int:
    """How many nests of loops the body of ``func`` is: that of two that are merged is the sum."""
    body = func.body.block.body
    return len(body.seq) if isinstance(body, tirx.SeqStmt) else 1


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
    """``func`` over variables of its own, or those of ``names`` in place of some."""

    def rename(var: tirx.Var, _: Any) -> tirx.Var:
        if var not in names:
            names[var] = tirx.Var(var.name, var.ty)
        return names[var]

    return tvm_ffi.structural_mutate(func, (tirx.Var, rename))
