"""Protect indices with quotients and remainders from a wrong rewriting in TVM.

TVM's ``FlattenBuffer`` looks for affine maps of the loops in each index. It wrongly simplifies
``(i + 1) % 20 // 10 * 10 + i % 10`` to ``(i + 1) % 20``. It skips functions in which the range of
one loop depends on another loop. So a function with such indices gets an empty loop nest of this
kind in front, which a later pass removes.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import IRModule, TensorLoad
from tvm.s_tir import SBlock, SBlockRealize

from tvmbridge.schedules.indexing import has_division, index_var, integer


def with_exact_indices(mod: IRModule) -> IRModule:
    """Return ``mod`` with an empty loop nest in each function whose indices need protection."""
    functions = dict(mod.functions_items())
    for name, function in functions.items():
        if isinstance(function, tirx.PrimFunc) and _divides(function.body):
            functions[name] = function.with_body(_guarded(function.body))
    return IRModule(functions, attrs=mod.attrs)


def _divides(body: tirx.Stmt) -> bool:
    """Whether any index in ``body`` has a quotient or a remainder."""
    if not has_division(body):  # One walk, where each index would need its own.
        return False
    accesses: list[Any] = []
    tvm_ffi.structural_walk(body, ((TensorLoad, tirx.BufferStore), accesses.append))
    return any(has_division(index) for access in accesses for index in access.indices)


def _guarded(body: tirx.Stmt) -> tirx.Stmt:
    if not isinstance(body, SBlockRealize):
        return tirx.SeqStmt([_empty_nest(), body])
    block = body.block
    block = SBlock(
        block.iter_vars,
        block.reads,
        block.writes,
        block.name_hint,
        tirx.SeqStmt([_empty_nest(), block.body]),
        block.init,
        block.alloc_buffers,
        block.match_buffers,
        block.annotations,
    )
    return SBlockRealize(body.iter_values, body.predicate, block)


def _empty_nest() -> tirx.Stmt:
    outer, inner = index_var("outer"), index_var("inner")
    serial = tirx.ForKind.SERIAL
    nothing = tirx.For(inner, integer(0), outer, serial, tirx.Evaluate(integer(0)))
    return tirx.For(outer, integer(0), integer(2), serial, nothing)
