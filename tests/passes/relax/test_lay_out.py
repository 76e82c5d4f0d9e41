"""LayOut: results are returned, and parameters are taken, with permuted dimensions."""

# ruff: noqa: ANN201  (the Relax functions here are TVM script)

from __future__ import annotations

import pytest
import torch
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from tests.relax_helpers import apply_pass, compile_and_run
from tvmbridge.passes.relax.lay_out import LayOut, Permuted

LAST = (0, 2, 1)
LAY_OUT = LayOut("f", (Permuted(1, LAST, (2, 3, 4)),), (Permuted(0, LAST, (2, 3, 4)),))


@I.ir_module
class Before:
    @R.function
    def f(x: R.Tensor((6, 4), "float64"), y: R.Tensor((6, 4), "float64")):
        with R.dataflow():
            total = R.add(x, y)
            cube = R.reshape(total, (2, 3, 4))
            gv = (total, cube)
            R.output(gv)
        return gv

    @R.function
    def g(x: R.Tensor((2, 3), "float64")):
        with R.dataflow():
            gv = R.negative(x)
            R.output(gv)
        return gv


@I.ir_module
class Expected:
    @R.function
    def f(x: R.Tensor((2, 4, 3), "float64"), y: R.Tensor((6, 4), "float64")):
        with R.dataflow():
            back = R.permute_dims(x, [0, 2, 1])
            flat = R.reshape(back, (6, 4))
            inside = flat
            total = R.add(inside, y)
            cube = R.reshape(total, (2, 3, 4))
            moved = R.permute_dims(cube, [0, 2, 1])
            gv = (total, moved)
            R.output(gv)
        return gv


def test_before_and_expected() -> None:
    after, report = apply_pass(LAY_OUT, Before)
    tvm.ir.assert_structural_equal(after["f"], Expected["f"])
    tvm.ir.assert_structural_equal(after["g"], Before["g"])
    assert report.rewrites == 2
    assert [p.name for p in after["f"].params] == ["x", "y"]


def test_without_results_and_parameters_nothing_changes() -> None:
    after, report = apply_pass(LayOut("f"), Before)
    tvm.ir.assert_structural_equal(after, Before)
    assert report.rewrites == 0


def test_what_is_no_order_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"\(0, 0, 1\) is no order of the dimensions of"):
        apply_pass(LayOut("f", (Permuted(1, (0, 0, 1), (2, 3, 4)),)), Before)


def test_numbers_and_that_twice_is_back() -> None:
    x, y = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    once, _ = apply_pass(LAY_OUT, Before)
    total, moved = compile_and_run(once, x.permute(LAST), y, name="f")
    torch.testing.assert_close(total, x.reshape(6, 4) + y, rtol=0, atol=0)
    assert torch.equal(moved, total.reshape(2, 3, 4).permute(LAST))
    again = LayOut("f", (Permuted(1, LAST, (2, 4, 3)),))
    twice, _ = apply_pass(again, once)
    assert torch.equal(compile_and_run(twice, x.permute(LAST), y, name="f")[1], moved.mT)
