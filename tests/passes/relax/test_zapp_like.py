"""ZappLike: ``*_like`` operators get explicit shapes; operators without an effect are removed."""

# ruff: noqa: ANN201, F841  (the Relax functions here are TVM script)

from __future__ import annotations

import pytest
import torch
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tests.relax_helpers import (
    assert_becomes,
    assert_changes_nothing,
    build_main,
    compile_and_run,
    operators,
)
from tvmbridge.passes.relax.zapp_like import ZappLike

op = relax.op


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor((2, 3, 4), "float32"), v: R.Tensor((), "float64")):
        with R.dataflow():
            ones = R.ones_like(x)
            zeros = R.zeros_like(x)
            filled = R.full_like(x, v)
            row = R.collapse_sum_to(ones, R.shape([4]))
            like = R.collapse_sum_like(zeros, row)
            kept = R.collapse_sum_to(x, R.shape([1, 4]))
            same = R.collapse_sum_to(filled, R.shape([2, 3, 4]))
            wide = R.broadcast_to(same, R.shape([2, 3, 4]))
            shaped = R.reshape(wide, R.shape([2, 3, 4]))
            cast = R.astype(shaped, dtype="float32")
            y = R.add(cast, like)
            z = R.add(y, kept)
            R.output(z)
        return z


@I.ir_module
class Expected:
    @R.function
    def main(x: R.Tensor((2, 3, 4), "float32"), v: R.Tensor((), "float64")):
        with R.dataflow():
            ones = R.full(R.shape([2, 3, 4]), R.const(1.0, "float32"), dtype="float32")
            zeros = R.full(R.shape([2, 3, 4]), R.const(0.0, "float32"), dtype="float32")
            value = R.astype(v, dtype="float32")
            filled = R.full(R.shape([2, 3, 4]), value, dtype="float32")
            row = R.sum(ones, axis=[0, 1])
            row_1 = row
            like = R.sum(zeros, axis=[0, 1])
            like_1 = like
            summed = R.sum(x, axis=[0, 1])
            kept = R.reshape(summed, R.shape([1, 4]))
            same = filled
            wide = same
            shaped = wide
            cast = shaped
            y = R.add(cast, like_1)
            z = R.add(y, kept)
            R.output(z)
        return z


@I.ir_module
class Declined:
    @R.function
    def main(x: R.Tensor(("n", 4), "float32"), y: R.Tensor((4,), "float32")):
        n = T.int64()
        with R.dataflow():
            ones = R.ones_like(x)
            wide = R.broadcast_to(y, R.shape([n, 4]))
            R.output(ones, wide)
        return (ones, wide)


def test_shapes_are_written_out() -> None:
    assert_becomes(ZappLike(), Before, Expected, 10)


def test_declines_with_the_reason() -> None:
    report = assert_changes_nothing(ZappLike(), Declined)
    assert report.declined == [
        "relax.ones_like: the shape is not static",
        "relax.broadcast_to: the shape is not static",
    ]


def test_agrees_with_pytorch_in_float64() -> None:
    x, v = torch.randn(2, 3, 4), torch.randn((), dtype=torch.float64)
    (result,) = compile_and_run(ZappLike()(Before), x, v)
    expected = v.float() + x.double().sum((0, 1))
    torch.testing.assert_close(result.double(), expected.expand(2, 3, 4), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((2, 3, 4), ()),
        ((2, 3, 4), (1,)),
        ((2, 3, 4), (3, 1)),
        ((2, 3, 4), (1, 3, 1)),
        ((2, 3, 4), (2, 1, 4)),
        ((1, 1, 4), (4,)),
        ((1, 3, 4), (1, 4)),
        ((2, 1, 4), (1, 4)),
        ((), ()),
    ],
)
def test_collapsed_sums_keep_their_shape(source: tuple[int, ...], target: tuple[int, ...]) -> None:
    x = torch.randn(source, dtype=torch.float64)
    mod = build_main((x,), lambda x: op.collapse_sum_to(x, relax.ShapeExpr(target)))
    after = ZappLike()(mod)
    assert "relax.collapse_sum_to" not in operators(after)
    (result,) = compile_and_run(after, x)
    torch.testing.assert_close(result, x.sum_to_size(target), rtol=1e-14, atol=1e-14)


def test_a_broadcast_that_changes_the_rank_stays() -> None:
    for source, target in (((4,), (1, 4)), ((1, 4), (3, 4)), ((), (1,))):
        x = torch.randn(source, dtype=torch.float64)
        mod = build_main((x,), lambda x, t=target: op.broadcast_to(x, t))
        assert_changes_nothing(ZappLike(), mod)
        (result,) = compile_and_run(ZappLike()(mod), x)
        assert torch.equal(result, x.expand(target))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float64])
def test_fills_have_the_dtype_of_their_model(dtype: torch.dtype) -> None:
    x = torch.ones(2, 3).to(dtype)
    mod = build_main((x,), lambda x: [op.ones_like(x), op.zeros_like(x)])
    ones, zeros = compile_and_run(ZappLike()(mod), x)
    assert torch.equal(ones, torch.ones_like(x))
    assert torch.equal(zeros, torch.zeros_like(x))


def test_fills_of_another_dtype_have_that_one() -> None:
    x = torch.ones(2, 3)
    mod = build_main((x,), lambda x: [op.ones_like(x, "float64"), op.zeros_like(x, "int64")])
    ones, zeros = compile_and_run(ZappLike()(mod), x)
    assert (ones.dtype, zeros.dtype) == (torch.float64, torch.int64)
    assert torch.equal(ones, torch.ones(2, 3, dtype=torch.float64))
