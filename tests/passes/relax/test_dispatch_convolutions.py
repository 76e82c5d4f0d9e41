"""DispatchConvolutions: the convolutions that PyTorch's kernel computes, and their biases."""

# ruff: noqa: ANN201, F841  (the Relax functions here are TVM script)

from __future__ import annotations

import torch
import tvm
from torch.nn import functional
from tvm.script import ir as I
from tvm.script import relax as R

from tests.relax_helpers import (
    apply_pass,
    assert_changes_nothing,
    compile_and_run,
)
from tvmbridge.passes.relax.dispatch_convolutions import DispatchConvolutions


@I.ir_module
class Before:
    @R.function
    def main(
        x: R.Tensor((2, 4, 6), "float64"),
        w: R.Tensor((4, 2, 3), "float64"),
        b: R.Tensor((4,), "float64"),
    ):
        with R.dataflow():
            bare = R.nn.conv1d(x, w, strides=[2], padding=[1, 1], groups=2)
            row = R.reshape(b, R.shape([1, 4, 1]))
            biased = R.add(bare, row)
            up = R.nn.conv1d_transpose(biased, w, strides=[3], output_padding=[1], groups=2)
            gv = (biased, up)
            R.output(gv)
        return gv


@I.ir_module
class Expected:
    @R.function
    def main(
        x: R.Tensor((2, 4, 6), "float64"),
        w: R.Tensor((4, 2, 3), "float64"),
        b: R.Tensor((4,), "float64"),
    ):
        with R.dataflow():
            row = R.reshape(b, R.shape([1, 4, 1]))
            biased = R.call_pure_packed(
                "tvmbridge.aten",
                R.str(
                    '{"op": "aten.convolution.default", "args": [{"tensor": 0}, {"tensor": 1}, '
                    '{"tensor": 2}, [2], [1], [1], false, [0], 2], "kwargs": {}, "results": null}'
                ),
                x,
                w,
                b,
                ty_args=[R.Tensor((2, 4, 3), "float64")],
            )
            up = R.call_pure_packed(
                "tvmbridge.aten",
                R.str(
                    '{"op": "aten.convolution.default", "args": [{"tensor": 0}, {"tensor": 1}, '
                    'null, [3], [0], [1], true, [1], 2], "kwargs": {}, "results": null}'
                ),
                biased,
                w,
                ty_args=[R.Tensor((2, 4, 10), "float64")],
            )
            gv = (biased, up)
            R.output(gv)
        return gv


@I.ir_module
class Declined:
    @R.function
    def main(
        x: R.Tensor((2, 6, 4), "float32"),
        y: R.Tensor((2, 4, 6), "float32"),
        w: R.Tensor((3, 4, 3), "float32"),
        h: R.Tensor((2, 4, 6), "float16"),
        hw: R.Tensor((3, 4, 3), "float16"),
    ):
        with R.dataflow():
            channels_last = R.nn.conv1d(x, w, data_layout="NWC")
            one_sided = R.nn.conv1d(y, w, padding=[0, 1])
            widened = R.nn.conv1d(h, hw, out_dtype="float32")
            gv = (channels_last, one_sided, widened)
            R.output(gv)
        return gv


@I.ir_module
class Biases:
    @R.function
    def main(
        x: R.Tensor((1, 3, 3, 3), "float64"),
        w: R.Tensor((3, 3, 1, 1), "float64"),
        b: R.Tensor((3,), "float64"),
        line: R.Tensor((1, 3), "float64"),
    ):
        with R.dataflow():
            row = R.reshape(b, R.shape([1, 3, 1, 1]))
            last = R.reshape(b, R.shape([1, 1, 1, 3]))
            flat = R.expand_dims(line, axis=[2])
            wide = R.reshape(flat, R.shape([1, 3, 1, 1]))
            returned = R.nn.conv2d(x, w)
            first = R.add(returned, row)
            left = R.nn.conv2d(first, w)
            second = R.add(row, left)
            columns = R.nn.conv2d(second, w)
            third = R.add(columns, last)
            matrix = R.nn.conv2d(third, w)
            fourth = R.add(matrix, wide)
            gv = (returned, first, second, third, fourth)
            R.output(gv)
        return gv


def test_convolutions_go_to_the_kernel_with_their_bias() -> None:
    after, report = apply_pass(DispatchConvolutions(), Before)
    tvm.ir.assert_structural_equal(after, Expected)
    assert (report.rewrites, report.declined) == (2, [])


def test_declines_with_the_reason() -> None:
    report = assert_changes_nothing(DispatchConvolutions(), Declined)
    assert report.declined == ["relax.nn.conv1d: PyTorch has no such convolution"] * 3


def test_agrees_with_pytorch_in_float64() -> None:
    x, w, b = (torch.randn(s, dtype=torch.float64) for s in ((2, 4, 6), (4, 2, 3), (4,)))
    biased = functional.conv1d(x, w, b, stride=2, padding=1, groups=2)
    up = functional.conv_transpose1d(biased, w, stride=3, output_padding=1, groups=2)
    torch.testing.assert_close(compile_and_run(Before, x, w, b), [biased, up])


def test_applied_twice_changes_nothing() -> None:
    once = DispatchConvolutions()(Biases)
    assert_changes_nothing(DispatchConvolutions(), once)


def test_only_a_vector_along_the_channels_is_a_bias() -> None:
    shapes = ((1, 3, 3, 3), (3, 3, 1, 1), (3,), (1, 3))
    x, w, b, line = (torch.randn(s, dtype=torch.float64) for s in shapes)
    after, report = apply_pass(DispatchConvolutions(), Biases)
    assert report.rewrites == 4
    text = after.script()
    assert text.count("R.add") == 3, "the result is read, a row of numbers, and a matrix"
    row = b.view(1, 3, 1, 1)
    returned = functional.conv2d(x, w)
    first = returned + row
    second = functional.conv2d(first, w) + row
    third = functional.conv2d(second, w) + b
    fourth = functional.conv2d(third, w) + line.view(1, 3, 1, 1)
    expected = [returned, first, second, third, fourth]
    torch.testing.assert_close(compile_and_run(after, x, w, b, line), expected)
