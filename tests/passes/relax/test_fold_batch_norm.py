"""FoldBatchNorm: factors and summands by channel are folded into the preceding convolution."""

# ruff: noqa: ANN201  (the Relax functions here are TVM script)

from __future__ import annotations

import torch
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.relax_helpers import (
    apply_pass,
    assert_changes_nothing,
    compile_and_run,
)
from tvmbridge.passes.relax.fold_batch_norm import FoldBatchNorm
from tvmbridge.pipeline import tidy_passes

FROZEN = ("w", "b", "scale", "shift")


@I.ir_module
class Before:
    @R.function
    def main(
        x: R.Tensor((2, 3, 5, 5), "float64"),
        w: R.Tensor((4, 3, 3, 3), "float64"),
        b: R.Tensor((4,), "float64"),
        scale: R.Tensor((4,), "float64"),
        shift: R.Tensor((4,), "float64"),
    ):
        with R.dataflow():
            bare = R.nn.conv2d(x, w, padding=[1, 1, 1, 1])
            row = R.reshape(b, R.shape([1, 4, 1, 1]))
            biased = R.add(bare, row)
            factor = R.reshape(scale, R.shape([4, 1, 1]))
            scaled = R.multiply(biased, factor)
            summand = R.reshape(shift, R.shape([4, 1, 1]))
            y = R.add(scaled, summand)
            gv = (y,)
            R.output(gv)
        return gv


@I.ir_module
class Expected:
    @R.function
    def main(
        x: R.Tensor((2, 3, 5, 5), "float64"),
        w: R.Tensor((4, 3, 3, 3), "float64"),
        b: R.Tensor((4,), "float64"),
        scale: R.Tensor((4,), "float64"),
        shift: R.Tensor((4,), "float64"),
    ):
        with R.dataflow():
            factor = R.reshape(scale, R.shape([4, 1, 1, 1]))
            weight = R.multiply(w, factor)
            moved = R.multiply(b, scale)
            summand = R.add(moved, shift)
            row = R.reshape(summand, R.shape([1, 4, 1, 1]))
            bare = R.nn.conv2d(x, weight, padding=[1, 1, 1, 1])
            y = R.add(bare, row)
            gv = (y,)
            R.output(gv)
        return gv


def _tidy(mod: tvm.IRModule) -> tvm.IRModule:
    for pass_ in tidy_passes():
        mod = pass_(mod)
    return mod


def _tensors() -> list[torch.Tensor]:
    shapes = [(2, 3, 5, 5), (4, 3, 3, 3), (4,), (4,), (4,)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def test_structure() -> None:
    after, report = apply_pass(FoldBatchNorm(FROZEN), Before)
    tvm.ir.assert_structural_equal(relax.transform.DeadCodeElimination()(after), Expected)
    assert report.rewrites == 1


def test_values() -> None:
    tensors = _tensors()
    (found,) = compile_and_run(_tidy(FoldBatchNorm(FROZEN)(Before)), *tensors)
    x, w, b, scale, shift = tensors
    y = torch.nn.functional.conv2d(x, w, b, padding=1)
    expected = y * scale[:, None, None] + shift[:, None, None]
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_weights_that_change_are_declined() -> None:
    report = assert_changes_nothing(FoldBatchNorm(("b", "scale", "shift")), Before)
    assert report.declined == ["relax.nn.conv2d: its weight is computed at each call"]


def test_a_factor_that_changes_is_none() -> None:
    assert_changes_nothing(FoldBatchNorm(("w", "b", "shift")), Before)


@I.ir_module
class ReadTwice:
    @R.function
    def main(
        x: R.Tensor((2, 3, 5, 5), "float64"),
        w: R.Tensor((4, 3, 3, 3), "float64"),
        scale: R.Tensor((4,), "float64"),
    ):
        with R.dataflow():
            bare = R.nn.conv2d(x, w, padding=[1, 1, 1, 1])
            factor = R.reshape(scale, R.shape([4, 1, 1]))
            scaled = R.multiply(bare, factor)
            gv = (scaled, bare)
            R.output(gv)
        return gv


def test_a_result_that_is_read_bare_stays() -> None:
    assert_changes_nothing(FoldBatchNorm(FROZEN), ReadTwice)


def test_twice_is_once() -> None:
    once = _tidy(FoldBatchNorm(FROZEN)(Before))
    assert_changes_nothing(FoldBatchNorm(FROZEN), once)
