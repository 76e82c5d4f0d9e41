"""CollapseViews: a chain of reshapes or permutations becomes one, or none."""

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
    build_main,
    compile_and_run,
    operators,
)
from tests.superfluous import superfluous
from tvmbridge.passes.relax.collapse_views import CollapseViews
from tvmbridge.pipeline import run_passes, tidy_passes

op = relax.op


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor((2, 6, 4), "float32")):
        with R.dataflow():
            flat = R.reshape(x, R.shape([12, 4]))
            wide = R.expand_dims(flat, axis=[1])
            heads = R.reshape(wide, R.shape([2, 6, 2, 2]))
            turned = R.permute_dims(heads, axes=[0, 2, 1, 3])
            copy = turned
            twice = R.permute_dims(copy, axes=[0, 1, -1, -2])
            rows = R.reshape(twice, R.shape([8, 6]))
            same = R.reshape(rows, R.shape([2, 2, 2, 6]))
            back = R.permute_dims(same, axes=[0, 1, 2, 3])
            y = R.exp(back)
            z = R.add(turned, turned)
            gv = (y, z)
            R.output(gv)
        return gv


@I.ir_module
class Expected:
    @R.function
    def main(x: R.Tensor((2, 6, 4), "float32")):
        with R.dataflow():
            heads = R.reshape(x, R.shape([2, 6, 2, 2]))
            turned = R.permute_dims(heads, axes=[0, 2, 1, 3])
            twice = R.permute_dims(heads, axes=[0, 2, 3, 1])
            y = R.exp(twice)
            z = R.add(turned, turned)
            gv = (y, z)
            R.output(gv)
        return gv


@I.ir_module
class Declined:
    @R.function
    def main(x: R.Tensor(("n", 4), "float32")):
        with R.dataflow():
            turned = R.permute_dims(x, axes=[1, 0])
            back = R.permute_dims(turned, axes=[1, 0])
            y = R.exp(back)
            R.output(y)
        return y


def test_chains_collapse() -> None:
    after, report = apply_pass(CollapseViews(), Before)
    tvm.ir.assert_structural_equal(run_passes(after, tidy_passes(), []), Expected)
    assert (report.rewrites, report.declined) == (5, [])


def test_declines_with_the_reason() -> None:
    after, report = apply_pass(CollapseViews(), Declined)
    tvm.ir.assert_structural_equal(after, Declined)
    assert report.declined == ["relax.permute_dims: the shape is not static"] * 2


def test_agrees_with_pytorch_in_float64() -> None:
    x = torch.randn(2, 6, 4)
    y, z = compile_and_run(run_passes(CollapseViews()(Before), tidy_passes(), []), x)
    turned = x.double().reshape(2, 6, 2, 2).permute(0, 2, 1, 3)
    torch.testing.assert_close(y.double(), turned.transpose(2, 3).exp(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(z.double(), 2 * turned, rtol=0, atol=0)


def test_applied_twice_changes_nothing() -> None:
    once = run_passes(CollapseViews()(Before), tidy_passes(), [])
    assert_changes_nothing(CollapseViews(), once)


def test_permutations_that_undo_each_other_go_away() -> None:
    x = torch.randn(2, 3, 4)
    mod = build_main(
        (x,), lambda x: op.exp(op.permute_dims(op.permute_dims(x, [1, 2, 0]), [2, 0, 1]))
    )
    after = run_passes(CollapseViews()(mod), tidy_passes(), [])
    assert operators(after) == ["relax.exp"]
    assert superfluous(after["main"]) == []


def test_permutations_without_axes_turn_all_around() -> None:
    x = torch.randn(2, 3, 4)
    mod = build_main((x,), lambda x: op.exp(op.permute_dims(op.permute_dims(x, [0, 2, 1]))))
    after = run_passes(CollapseViews()(mod), tidy_passes(), [])
    assert operators(after) == ["relax.permute_dims", "relax.exp"]
    (result,) = compile_and_run(after, x)
    torch.testing.assert_close(result, x.permute(1, 2, 0).exp())
