"""FuseOps over fields of tuples, which TVM's own pass groups at random, sometimes ill-formed."""

from __future__ import annotations

import pytest
import torch
import tvm
import tvm_ffi
from torch import nn
from tvm import relax
from tvm.relax import op

from tvmbridge import add_tvm_dispatch, dispatch_report
from tvmbridge.legalize import LEGALIZE_MAP
from tvmbridge.passes.base import PassReport
from tvmbridge.passes.relax.fuse_ops import FuseOps

_SHAPE = (4, 8)
_TYPE = relax.TensorType(_SHAPE, "float32")


def _module(tuples: int, fields: int, *, split: bool = False) -> tvm.IRModule:
    """Return a module that subtracts all fields of several tuples.

    With ``split`` the tuples are splits, which can be fused, and two chains read the fields.
    """
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4 * fields, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            made = []
            for i in range(tuples):
                shifted = builder.emit(op.add(x, relax.const(float(i), "float32")))
                whole = relax.TupleType([_TYPE] * fields)
                packed = op.call_pure_packed("made", shifted, ty_args=[whole])
                made.append(builder.emit(op.split(shifted, fields) if split else packed))
            sums = []
            for shift in range(2 if split else 1):
                total = None
                for number in range(fields * tuples):
                    whole = made[number % tuples]
                    field = builder.emit(
                        relax.TupleGetItem(whole, (number // tuples + number * shift) % fields)
                    )
                    total = field if total is None else builder.emit(op.subtract(total, field))
                sums.append(builder.emit(op.nn.softmax(total) if split else total))
            result = builder.emit_output(op.matmul(sums[0], op.permute_dims(sums[-1])))
        builder.emit_func_output(result)
    passes = [
        relax.transform.EliminateCommonSubexpr(),
        relax.transform.LegalizeOps(LEGALIZE_MAP),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.DeadCodeElimination(),
    ]
    return tvm.ir.transform.Sequential(passes)(builder.get())


def _fused(mod: tvm.IRModule) -> tuple[tvm.IRModule, PassReport]:
    report = PassReport()
    fused = FuseOps().apply(mod, report)
    relax.analysis.well_formed(fused)
    return fused, report


@pytest.mark.parametrize("split", [False, True])
def test_groups_that_read_many_tuples_are_well_formed(split: bool) -> None:
    for tuples in (2, 13):
        fused, report = _fused(_module(tuples, 3, split=split))
        assert report.rewrites
        # TVM's hash tables are ordered by address, so a second module tries another order.
        again, _ = _fused(_module(tuples, 3, split=split))
        assert tvm_ffi.structural_equal(fused, again)


def test_what_reads_one_tuple_is_fused_as_by_tvm() -> None:
    for mod in (_module(1, 3), _module(1, 3, split=True)):
        fused, report = _fused(mod)
        assert not report.rewrites
        assert tvm_ffi.structural_equal(fused, relax.transform.FuseOps()(mod))


class _Halves(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b, c = x.chunk(2), y.chunk(2), (x * y).chunk(2)
        left = torch.softmax(a[0] * b[1] - c[0], -1)
        right = torch.softmax(a[1] * b[0] - c[1] + a[0], -1)
        return left @ right.T


class _Sorted(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = y
        for i in range(5):
            values, indices = torch.sort(x * (i - 2.5), 0)
            total = total * 2 + values * indices
        return total


@pytest.mark.parametrize("module", [_Halves(), _Sorted()])
def test_equals_eager(module: nn.Module) -> None:
    x, y = torch.randn(6, 6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64)
    expected = module(x, y)
    add_tvm_dispatch(module.eval(), (x, y))
    torch.testing.assert_close(module(x, y), expected)
    assert dispatch_report(module).tvm_calls == 1


def _chain(length: int) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var("x", _TYPE)
    with builder.function("main", [x]):
        with builder.dataflow():
            value: relax.Expr = x
            for _ in range(length):
                value = builder.emit(op.tanh(value))
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    passes = [relax.transform.LegalizeOps(LEGALIZE_MAP), relax.transform.AnnotateTIROpPattern()]
    return tvm.ir.transform.Sequential(passes)(builder.get())


def _operators_of_groups(mod: tvm.IRModule) -> list[int]:
    return [
        sum(len(block.bindings) for block in function.body.blocks)
        for _, function in mod.functions_items()
        if isinstance(function, relax.Function) and "Primitive" in function.attrs
    ]


def test_long_chains_of_equal_layers_are_calls_of_few_functions() -> None:
    fused, _ = _fused(_chain(200))
    groups = _operators_of_groups(fused)
    # All full groups share one function; the last group may be smaller.
    assert len(groups) <= 2
    assert max(groups) <= 65
    calls = sum(len(block.bindings) for block in fused["main"].body.blocks)
    assert calls <= 200 // 64 + 2


def _sums(length: int) -> tvm.IRModule:
    """Return a module that returns each value of a chain, or the sum of its columns."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", _TYPE)
    with builder.function("main", [x]):
        with builder.dataflow():
            value: relax.Expr = x
            found = []
            for i in range(length):
                value = builder.emit(op.tanh(op.add(value, relax.const(float(i), "float32"))))
                found.append(builder.emit(op.sum(value, axis=[0])) if i % 3 == 0 else value)
            result = builder.emit_output(relax.Tuple([*found, found[0]]))
        builder.emit_func_output(result)
    passes = [relax.transform.LegalizeOps(LEGALIZE_MAP), relax.transform.AnnotateTIROpPattern()]
    return tvm.ir.transform.Sequential(passes)(builder.get())


def test_returned_fields_are_grouped_as_by_tvm() -> None:
    mod = _sums(8)
    before = mod.clone()
    fused, _ = _fused(mod)
    assert tvm_ffi.structural_equal(fused, relax.transform.FuseOps()(mod))
    assert tvm_ffi.structural_equal(mod, before)
    (block,) = fused["main"].body.blocks
    assert [b.var.name for b in block.bindings if not isinstance(b.var, relax.DataflowVar)] == [
        fused["main"].body.body.name
    ]
