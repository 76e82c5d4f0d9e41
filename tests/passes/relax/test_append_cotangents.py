"""AppendCotangents: append the scalar that Gradient differentiates."""

# ruff: noqa: ANN201  (the Relax functions here are TVM script)

from __future__ import annotations

import pytest
import torch
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from tests.relax_helpers import apply_pass, compile_and_run
from tvmbridge.passes.relax.append_cotangents import AppendCotangents


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            y = R.exp(x)
            z = R.sum(x)
            gv = (y, z)
            R.output(gv)
        return gv


@I.ir_module
class Expected:
    @R.function
    def main(
        x: R.Tensor((2, 3), "float32"),
        ct_0: R.Tensor((2, 3), "float32"),
        ct_1: R.Tensor((), "float32"),
    ):
        with R.dataflow():
            y = R.exp(x)
            z = R.sum(x)
            gv = (y, z)
            weighted = R.multiply(y, ct_0)
            first = R.sum(weighted)
            weighted_1 = R.multiply(z, ct_1)
            second = R.sum(weighted_1)
            both = R.add(first, second)
            total = both
            out_0 = y
            out_1 = z
            R.output(gv, total, out_0, out_1)
        return (total, out_0, out_1)


@I.ir_module
class Mixed:
    @R.function
    def main(x: R.Tensor((2, 3), "float64"), i: R.Tensor((2,), "int64")):
        with R.dataflow():
            low = R.astype(x, "float32")
            count = R.add(i, i)
            gv = (x, count, low, low)
            R.output(gv)
        return gv


@I.ir_module
class OneTensor:
    @R.function
    def main(x: R.Tensor((2, 3), "float64")):
        with R.dataflow():
            y = R.exp(x)
            R.output(y)
        return y


def test_appends_the_weighted_sum() -> None:
    after, report = apply_pass(AppendCotangents((0, 1)), Before)
    tvm.ir.assert_structural_equal(after, Expected)
    assert (report.rewrites, report.declined) == (2, [])


def test_outputs_that_are_not_asked_for_have_no_cotangent() -> None:
    after, report = apply_pass(AppendCotangents((1,), prefix="grad_"), Before)
    assert [p.name for p in after["main"].params] == ["x", "grad_1"]
    assert report.rewrites == 1


def test_agrees_with_pytorch_in_float64() -> None:
    x = torch.randn(2, 3, dtype=torch.float64)
    i = torch.tensor([1, 2])
    cotangents = [torch.randn(2, 3, dtype=d) for d in (torch.float64, torch.float32, torch.float32)]
    after = AppendCotangents((0, 2, 3))(Mixed)
    total, *outputs = compile_and_run(after, x, i, *cotangents)
    low = x.float()
    assert [torch.equal(o, w) for o, w in zip(outputs, (x, i + i, low, low), strict=True)]
    expected = (x * cotangents[0]).sum() + sum((low * c).double().sum() for c in cotangents[1:])
    assert total.dtype == torch.float64
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)


def test_a_single_tensor_is_returned_behind_the_scalar() -> None:
    x, cotangent = torch.randn(2, 2, 3, dtype=torch.float64)
    total, y = compile_and_run(AppendCotangents((0,))(OneTensor), x, cotangent)
    torch.testing.assert_close(total, (x.exp() * cotangent).sum(), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(y, x.exp(), rtol=1e-14, atol=0)


def test_applied_twice_another_scalar_is_put_in_front() -> None:
    """Check that a second application adds parameters and a scalar, and keeps earlier results."""
    once = AppendCotangents((0,))(OneTensor)
    twice = AppendCotangents((0, 1), prefix="second_")(once)
    assert [p.name for p in twice["main"].params] == ["x", "ct_0", "second_0", "second_1"]
    x, first, third = torch.randn(3, 2, 3, dtype=torch.float64)
    second = torch.randn((), dtype=torch.float64)
    total, inner, y = compile_and_run(twice, x, first, second, third)
    want_inner, want_y = compile_and_run(once, x, first)
    torch.testing.assert_close([inner, y], [want_inner, want_y], rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(total, inner * second + (y * third).sum(), rtol=1e-13, atol=1e-13)


def test_no_outputs_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="no output"):
        AppendCotangents(())(Before)
