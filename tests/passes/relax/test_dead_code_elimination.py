"""DeadCodeElimination removes values that nothing reads, with the result of TVM's own pass."""

from __future__ import annotations

import torch
import tvm
from tvm import relax
from tvm.relax import op

from tests.relax_helpers import (
    apply_pass,
    assert_changes_nothing,
    build_main,
    compile_and_run,
    operators,
)
from tvmbridge.passes.relax.dead_code_elimination import DeadCodeElimination, DropUnreadTuples


def _chains(dead: int) -> tvm.IRModule:
    """Return a chain of additions with ``dead`` unused chains of two products beside it."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 3), "float64"))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = x
            for _ in range(dead):
                builder.emit(op.multiply(builder.emit(op.multiply(value, x)), x))
                value = builder.emit(op.add(value, x))
            out = builder.emit_output(relax.Tuple([value]))
        builder.emit_func_output(out)
    return builder.get()


def test_what_nothing_reads_goes_away() -> None:
    mod = _chains(20)
    after, report = apply_pass(DeadCodeElimination(), mod)
    assert operators(after) == ["relax.add"] * 20
    assert report.rewrites == 40
    tvm.ir.assert_structural_equal(after, relax.transform.DeadCodeElimination()(mod))
    assert_changes_nothing(DeadCodeElimination(), after)


def test_results_stay() -> None:
    x = torch.randn(2, 3, dtype=torch.float64)
    (result,) = compile_and_run(DeadCodeElimination()(_chains(3)), x)
    torch.testing.assert_close(result, 4 * x)


def test_what_is_read_stays() -> None:
    x = torch.randn(2, 4)
    mod = build_main([x], lambda x: [relax.TupleGetItem(op.split(x, 2, 1), 1), op.exp(x)])
    assert assert_changes_nothing(DeadCodeElimination(), mod).declined == []


def test_tuples_that_nothing_reads_hold_no_memory() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 3), "float64"))
    with builder.function("main", [x], pure=False):
        kernel = relax.ExternFunc("kernel")
        first, second = (
            builder.emit(relax.Call(kernel, [x], ty_args=[x.ty]), name) for name in ("a", "b")
        )
        builder.emit(relax.Tuple([first, second]), "unread")
        read = builder.emit(relax.Tuple([second, first]), "read")
        builder.emit(relax.Call(kernel, [read], ty_args=[x.ty]), "c")
        builder.emit_func_output(builder.emit(relax.Tuple([first]), "result"))
    after, report = apply_pass(DropUnreadTuples(), builder.get())
    names = [b.var.name for block in after["main"].body.blocks for b in block.bindings]
    assert names == ["a", "b", "read", "c", "result"]
    assert report.rewrites == 1
    assert_changes_nothing(DropUnreadTuples(), after)
