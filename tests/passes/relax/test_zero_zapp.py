"""ZeroZapp: additions and subtractions of zero go away; products with zero stay."""

# ruff: noqa: ANN201  (the Relax functions here are TVM script)

from __future__ import annotations

import pytest
import torch
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.relax_helpers import apply_pass, build_main, compile_and_run, fingerprint, operators
from tvmbridge.passes.relax.zero_zapp import ZeroZapp

op = relax.op


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3,), "float32")):
        with R.dataflow():
            zeros = R.zeros(R.shape([2, 3]), dtype="float32")
            left = R.add(zeros, x)
            right = R.add(left, R.const([0.0, 0.0, 0.0], "float32"))
            less = R.subtract(right, zeros)
            wide = R.add(w, zeros)
            minus = R.subtract(zeros, less)
            product = R.multiply(minus, zeros)
            y = R.add(wide, minus)
            gv = (y, product)
            R.output(gv)
        return gv


@I.ir_module
class Expected:
    @R.function
    def main(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3,), "float32")):
        with R.dataflow():
            zeros = R.zeros(R.shape([2, 3]), dtype="float32")
            left = x
            right = left
            less = right
            wide = R.broadcast_to(w, R.shape([2, 3]))
            minus = R.subtract(zeros, less)
            product = R.multiply(minus, zeros)
            y = R.add(wide, minus)
            gv = (y, product)
            R.output(gv)
        return gv


@I.ir_module
class Declined:
    @R.function
    def main(x: R.Tensor(("n",), "float32")):
        with R.dataflow():
            y = R.add(R.const(0.0, "float32"), x)
            R.output(y)
        return y


def test_zeros_go_away() -> None:
    after, report = apply_pass(ZeroZapp(), Before)
    tvm.ir.assert_structural_equal(after, Expected)
    assert (report.rewrites, report.declined) == (4, [])


def test_declines_with_the_reason() -> None:
    after, report = apply_pass(ZeroZapp(), Declined)
    tvm.ir.assert_structural_equal(after, Declined)
    assert report.rewrites == 0
    assert report.declined == ["relax.add: the shape is not static"]


def test_leaves_its_input_untouched() -> None:
    before = fingerprint(Before)
    ZeroZapp()(Before)
    assert fingerprint(Before) == before


def test_agrees_with_pytorch_in_float64() -> None:
    x, w = torch.randn(2, 3), torch.randn(3)
    y, product = compile_and_run(ZeroZapp()(Before), x, w)
    torch.testing.assert_close(y.double(), w.double() - x.double(), rtol=1e-6, atol=1e-6)
    assert torch.equal(product, torch.zeros(2, 3))


def test_applied_twice_changes_nothing() -> None:
    once = ZeroZapp()(Before)
    twice, report = apply_pass(ZeroZapp(), once)
    tvm.ir.assert_structural_equal(twice, once)
    assert report.rewrites == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64])
def test_holds_for_every_number(dtype: torch.dtype) -> None:
    x = torch.tensor([[-3, 0, 7], [1, 2**24, -(2**24)]]).to(dtype)
    if dtype.is_floating_point:
        x[0, 0], x[0, 2] = float("nan"), -float("inf")
    name = str(dtype).removeprefix("torch.")
    mod = build_main((x,), lambda x: op.add(op.zeros((2, 3), name), x))
    after = ZeroZapp()(mod)
    assert operators(after) == ["relax.zeros"]
    (result,) = compile_and_run(after, x)
    torch.testing.assert_close(result, x, rtol=0, atol=0, equal_nan=True)


def test_zeros_from_one_element_that_is_not_stay() -> None:
    mod = build_main(
        (torch.ones(3),), lambda x: op.add(x, relax.const([0.0, 1e-45, 0.0], "float32"))
    )
    tvm.ir.assert_structural_equal(ZeroZapp()(mod), mod)
