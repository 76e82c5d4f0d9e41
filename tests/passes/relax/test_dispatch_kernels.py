"""DispatchKernels: the products and look-ups that PyTorch's kernels compute, and their calls."""

# ruff: noqa: ANN201, F841  (the Relax functions here are TVM script)

from __future__ import annotations

import torch
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from tests.relax_helpers import (
    apply_pass,
    assert_changes_nothing,
    compile_and_run,
)
from tvmbridge.passes.relax.dispatch_kernels import DispatchKernels


@I.ir_module
class Before:
    @R.function
    def main(
        x: R.Tensor((3, 4), "float32"),
        w: R.Tensor((5, 4), "float32"),
        b: R.Tensor((5,), "float32"),
        i: R.Tensor((2, 3), "int64"),
    ):
        with R.dataflow():
            transposed = R.permute_dims(w, axes=[1, 0])
            product = R.matmul(x, transposed)
            biased = R.add(product, b)
            batch = R.reshape(biased, R.shape([3, 1, 5]))
            flipped = R.permute_dims(batch, axes=[0, 2, 1])
            outer = R.matmul(flipped, batch)
            rows = R.take(w, i, axis=0)
            gv = (outer, rows)
            R.output(gv)
        return gv


@I.ir_module
class Expected:
    @R.function
    def main(
        x: R.Tensor((3, 4), "float32"),
        w: R.Tensor((5, 4), "float32"),
        b: R.Tensor((5,), "float32"),
        i: R.Tensor((2, 3), "int64"),
    ):
        with R.dataflow():
            transposed = R.permute_dims(w, axes=[1, 0])
            biased = R.call_dps_packed(
                "tvmbridge.matmul",
                (R.str('{"views": [null, [[4, 5], [1, 4]]], "result": [3, 5]}'), x, w, b),
                out_ty=R.Tensor((3, 5), "float32"),
            )
            batch = R.reshape(biased, R.shape([3, 1, 5]))
            flipped = R.permute_dims(batch, axes=[0, 2, 1])
            outer = R.call_dps_packed(
                "tvmbridge.matmul",
                (
                    R.str(
                        '{"views": [[[3, 5, 1], [5, 1, 5]], [[3, 1, 5], [5, 5, 1]]], '
                        '"result": [3, 5, 5]}'
                    ),
                    biased,
                    biased,
                ),
                out_ty=R.Tensor((3, 5, 5), "float32"),
            )
            rows = R.call_pure_packed(
                "tvmbridge.aten",
                R.str(
                    '{"op": "aten.embedding.default", "args": [{"tensor": 0}, {"tensor": 1}], '
                    '"kwargs": {}, "results": null}'
                ),
                w,
                i,
                ty_args=[R.Tensor((2, 3, 4), "float32")],
            )
            gv = (outer, rows)
            R.output(gv)
        return gv


@I.ir_module
class Declined:
    @R.function
    def main(
        s: R.Tensor(("n", 4), "float32"),
        w: R.Tensor((4, 5), "float32"),
        v: R.Tensor((4,), "float32"),
        t: R.Tensor((2, 3, 4), "float32"),
        one: R.Tensor((1, 4, 5), "float32"),
        i: R.Tensor((4, 5), "int32"),
        j: R.Tensor((5, 4), "int32"),
    ):
        with R.dataflow():
            symbolic = R.matmul(s, w)
            vectors = R.matmul(v, v)
            ranks = R.matmul(t, w)
            extents = R.matmul(t, one)
            integers = R.matmul(i, j)
            columns = R.take(w, j, axis=1)
            clipped = R.take(w, j, axis=0, mode="clip")
            deep = R.take(t, j, axis=0)
            slot = R.grad.take_backward(w, w, j, axis=1)
            gv = (symbolic, vectors, ranks, extents, integers, columns, clipped, deep, slot)
            R.output(gv)
        return gv


@I.ir_module
class Biases:
    @R.function
    def main(
        x: R.Tensor((5, 5), "float64"),
        b: R.Tensor((5,), "float64"),
        column: R.Tensor((5, 1), "float64"),
    ):
        with R.dataflow():
            twice = R.matmul(x, x)
            first = R.add(twice, b)
            second = R.add(twice, b)
            returned = R.matmul(x, first)
            third = R.add(returned, b)
            left = R.matmul(x, second)
            fourth = R.add(b, left)
            down = R.matmul(x, third)
            fifth = R.add(down, column)
            square = R.matmul(x, fourth)
            sixth = R.add(square, square)
            gv = (first, second, returned, third, fourth, fifth, sixth)
            R.output(gv)
        return gv


def test_products_and_look_ups_go_to_kernels() -> None:
    after, report = apply_pass(DispatchKernels(fuse_bias=("float32",)), Before)
    tvm.ir.assert_structural_equal(after, Expected)
    assert (report.rewrites, report.declined) == (3, [])


def test_declines_with_the_reason() -> None:
    report = assert_changes_nothing(DispatchKernels(), Declined)
    assert report.declined == [
        "matmul: the shapes are not static",
        "matmul: an operand is a vector",
        "matmul: the batch is broadcast",
        "matmul: the batch is broadcast",
        "matmul: the dtype is int32",
        "take: not a look-up of rows",
        "take: not PyTorch's kind of indices",
        "take: not a look-up of rows",
        "take_backward: not a look-up of rows",
    ]


def test_agrees_with_pytorch_in_float64() -> None:
    x, w, b = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    i = torch.tensor([[4, 0, 0], [1, 2, 4]])
    outer, rows = compile_and_run(Before, x, w, b, i)
    biased = (x.double() @ w.double().t() + b.double())[:, None]
    torch.testing.assert_close(outer.double(), biased.mT @ biased, rtol=1e-5, atol=1e-5)
    assert torch.equal(rows, w[i])


def test_applied_twice_changes_nothing() -> None:
    for module in (Before, Biases):
        once = DispatchKernels(fuse_bias=("float32", "float64"))(module)
        assert_changes_nothing(DispatchKernels(), once)


def test_a_bias_is_fused_only_where_nothing_else_reads_the_product() -> None:
    x, b, column = (torch.randn(s, dtype=torch.float64) for s in ((5, 5), (5,), (5, 1)))
    after, report = apply_pass(DispatchKernels(fuse_bias=("float64",)), Biases)
    assert report.rewrites == 5
    assert _biased_calls(after) == 0
    got = compile_and_run(after, x, b, column)
    first = x @ x + b
    returned = x @ first
    third = returned + b
    fourth = x @ first + b
    expected = [first, first, returned, third, fourth, x @ third + column, 2 * (x @ fourth)]
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_a_bias_is_fused_in_the_dtypes_that_are_named() -> None:
    after, report = apply_pass(DispatchKernels(), Before)
    assert report.rewrites == 3
    assert _biased_calls(after) == 0
    assert _biased_calls(DispatchKernels(fuse_bias=("float32",))(Before)) == 1


def _biased_calls(mod: tvm.IRModule) -> int:
    """Return the number of product calls that have a bias among their arguments."""
    calls = [b.value for b in mod["main"].body.blocks[0].bindings]
    kernel = tvm.ir.Op.get("relax.call_dps_packed")
    products = [c for c in calls if getattr(c, "op", None) == kernel]
    return sum(len(c.args[1].fields) == 4 for c in products)


@I.ir_module
class Last:
    @R.function
    def main(
        x: R.Tensor((6, 4), "float32"),
        w: R.Tensor((4, 5), "float32"),
        b: R.Tensor((5,), "float32"),
    ):
        with R.dataflow():
            product = R.matmul(x, w)
            batch = R.reshape(product, R.shape([2, 3, 5]))
            biased = R.add(batch, b)
            gv = (biased, x)
            R.output(gv)
        return gv


@I.ir_module
class LastExpected:
    @R.function
    def main(
        x: R.Tensor((6, 4), "float32"),
        w: R.Tensor((4, 5), "float32"),
        b: R.Tensor((5,), "float32"),
    ):
        with R.dataflow():
            product = R.call_dps_packed(
                "tvmbridge.matmul",
                (R.str('{"views": [null, null], "result": [6, 5]}'), x, w, b),
                out_ty=R.Tensor((6, 5), "float32"),
            )
            biased = R.reshape(product, R.shape([2, 3, 5]))
            gv = (biased, x)
            R.output(gv)
        return gv


def test_a_bias_whose_sum_is_a_result_is_fused_in_any_dtype() -> None:
    after, _ = apply_pass(DispatchKernels(), Last)
    tvm.ir.assert_structural_equal(after, LastExpected)
    x, w, b = torch.randn(6, 4), torch.randn(4, 5), torch.randn(5)
    found, _ = compile_and_run(after, x, w, b)
    expected = (x.double() @ w.double()).view(2, 3, 5) + b.double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
