"""RewriteDataflowReshape: reshapes become views, beside very large tensors and of them too."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax, tirx

from tests.relax_helpers import apply_pass, operators
from tvmbridge.backends import resolve_target
from tvmbridge.compiler.build import compile_code, make_ready, prepare, schedule
from tvmbridge.passes.relax.rewrite_dataflow_reshape import RewriteDataflowReshape


def _module(rows: int, columns: int, *, flat: bool) -> tvm.IRModule:
    """Return a module that reshapes a byte matrix to a vector (``flat``), or transposes it."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((rows, columns), "int8"))
    with builder.function("main", [x]):
        with builder.dataflow():
            moved = relax.op.reshape(x, (rows * columns,)) if flat else relax.op.permute_dims(x)
            out = builder.emit_output(relax.Tuple([builder.emit(moved)]))
        builder.emit_func_output(out)
    return builder.get()


def test_a_copy_in_order_is_a_reshape() -> None:
    mod = relax.transform.LegalizeOps()(_module(4, 6, flat=True))
    assert operators(mod) == ["relax.call_tir"]
    after, report = apply_pass(RewriteDataflowReshape(), mod)
    assert operators(after) == ["relax.reshape"]
    assert report.declined == []


@pytest.mark.parametrize("flat", [True, False])
def test_more_elements_than_32_bits_count_compile(flat: bool) -> None:
    mod = _module(1_100_000, 2000, flat=flat)
    small = relax.transform.LegalizeOps()(mod)
    after, report = apply_pass(RewriteDataflowReshape(), small)
    assert operators(after) == ["relax.reshape" if flat else "relax.call_tir"]
    assert report.declined == []
    for name, function in small.functions_items():
        if isinstance(function, tirx.PrimFunc):
            assert after[name].same_as(function)
    target = resolve_target(None)
    make_ready(target)
    code = compile_code(schedule(prepare(mod, target, []), []), [])
    assert code.executable is not None


def test_a_small_reshape_beside_a_large_copy_is_a_reshape() -> None:
    """The largest of the sizes that code for any size is compiled at may have such copies."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1_100_000, 2000), "int8"))
    y = relax.Var("y", relax.TensorType((4, 6), "int8"))
    with builder.function("main", [x, y]):
        with builder.dataflow():
            first = builder.emit(relax.op.strided_slice(x, [0], [0], [1_090_000]))
            moved = builder.emit(relax.op.permute_dims(first))
            flat = builder.emit(relax.op.reshape(y, (24,)))
            out = builder.emit_output(relax.Tuple([moved, flat]))
        builder.emit_func_output(out)
    mod = relax.transform.LegalizeOps()(builder.get())
    after, _ = apply_pass(RewriteDataflowReshape(), mod)
    assert operators(after) == ["relax.call_tir", "relax.call_tir", "relax.reshape"]
