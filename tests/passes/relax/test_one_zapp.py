"""OneZapp: multiplications and divisions by one go away."""

# ruff: noqa: ANN201  (the Relax functions here are TVM script)

from __future__ import annotations

import pytest
import torch
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.relax_helpers import apply_pass, build_main, compile_and_run, fingerprint, operators
from tvmbridge.passes.relax.one_zapp import OneZapp

op = relax.op


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3,), "float32")):
        with R.dataflow():
            ones = R.ones(R.shape([2, 3]), dtype="float32")
            left = R.multiply(ones, x)
            right = R.multiply(left, R.const(1.0, "float32"))
            quotient = R.divide(right, ones)
            wide = R.multiply(ones, w)
            inverse = R.divide(ones, quotient)
            y = R.add(inverse, wide)
            R.output(y)
        return y


@I.ir_module
class Expected:
    @R.function
    def main(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3,), "float32")):
        with R.dataflow():
            ones = R.ones(R.shape([2, 3]), dtype="float32")
            left = x
            right = left
            quotient = right
            wide = R.broadcast_to(w, R.shape([2, 3]))
            inverse = R.divide(ones, quotient)
            y = R.add(inverse, wide)
            R.output(y)
        return y


@I.ir_module
class Declined:
    @R.function
    def main(x: R.Tensor(("n",), "float32")):
        with R.dataflow():
            y = R.multiply(x, R.const(1.0, "float32"))
            R.output(y)
        return y


def test_ones_go_away() -> None:
    after, report = apply_pass(OneZapp(), Before)
    tvm.ir.assert_structural_equal(after, Expected)
    assert (report.rewrites, report.declined) == (4, [])


def test_declines_with_the_reason() -> None:
    after, report = apply_pass(OneZapp(), Declined)
    tvm.ir.assert_structural_equal(after, Declined)
    assert report.rewrites == 0
    assert report.declined == ["relax.multiply: the shape is not static"]


def test_leaves_its_input_untouched() -> None:
    before = fingerprint(Before)
    OneZapp()(Before)
    assert fingerprint(Before) == before


def test_agrees_with_pytorch_in_float64() -> None:
    x, w = torch.randn(2, 3), torch.randn(3)
    (result,) = compile_and_run(OneZapp()(Before), x, w)
    torch.testing.assert_close(result.double(), 1 / x.double() + w.double(), rtol=1e-6, atol=1e-6)


def test_applied_twice_changes_nothing() -> None:
    once = OneZapp()(Before)
    twice, report = apply_pass(OneZapp(), once)
    tvm.ir.assert_structural_equal(twice, once)
    assert report.rewrites == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64])
def test_holds_for_every_number(dtype: torch.dtype) -> None:
    x = torch.tensor([[-3, 0, 7], [1, 2**24, -(2**24)]]).to(dtype)
    if dtype.is_floating_point:
        x[0, 0], x[0, 2] = float("nan"), -float("inf")
    name = str(dtype).removeprefix("torch.")
    mod = build_main((x,), lambda x: op.multiply(op.ones((2, 3), name), x))
    after = OneZapp()(mod)
    assert operators(after) == ["relax.ones"]
    (result,) = compile_and_run(after, x)
    torch.testing.assert_close(result, x, rtol=0, atol=0, equal_nan=True)


def test_what_only_rounds_to_one_stays() -> None:
    for almost in (1.0000001, 0.0, -1.0, float("nan")):
        mod = build_main(
            (torch.ones(3),), lambda x, a=almost: op.multiply(x, relax.const(a, "float32"))
        )
        tvm.ir.assert_structural_equal(OneZapp()(mod), mod)


def test_ones_that_are_cut_from_other_numbers_are_no_ones() -> None:
    """1.5 as an integer is 1, but 0.5 is 0: a value is followed through no conversion."""
    half = relax.const(0.5, "float64")
    mod = build_main(
        (torch.ones(3, dtype=torch.int64),),
        lambda x: op.add(op.full((3,), half, "int64"), op.multiply(x, op.astype(half, "int64"))),
    )
    tvm.ir.assert_structural_equal(OneZapp()(mod), mod)


def test_both_operands_ones() -> None:
    mod = build_main((), lambda: op.multiply(op.ones((3, 1), "float64"), op.ones((4,), "float64")))
    (result,) = compile_and_run(OneZapp()(mod))
    assert torch.equal(result, torch.ones(3, 4, dtype=torch.float64))
