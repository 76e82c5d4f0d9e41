"""ColumnsFirst: weights of products become ones that products read transposed."""

# ruff: noqa: ANN201  (the Relax functions here are TVM script)

from __future__ import annotations

import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from tests.relax_helpers import apply_pass, assert_changes_nothing
from tvmbridge.passes.relax.columns_first import ColumnsFirst


@I.ir_module
class Expected:
    @R.function
    def forward(
        x: R.Tensor((3, 4), "float32"),
        w: R.Tensor((4, 5), "float32"),
        turned: R.Tensor((6, 5), "float32"),
    ):
        with R.dataflow():
            first = R.permute_dims(w)
            second = R.permute_dims(first)
            y = R.matmul(x, second)
            columns = R.permute_dims(turned)
            z = R.matmul(y, columns)
            gv = (z,)
            R.output(gv)
        return gv


@I.ir_module
class Plain:
    @R.function
    def forward(
        x: R.Tensor((3, 4), "float32"),
        w: R.Tensor((4, 5), "float32"),
        turned: R.Tensor((6, 5), "float32"),
    ):
        with R.dataflow():
            y = R.matmul(x, w)
            columns = R.permute_dims(turned)
            z = R.matmul(y, columns)
            gv = (z,)
            R.output(gv)
        return gv


_PASS = ColumnsFirst(("w", "turned"))


def test_a_weight_that_is_read_as_it_is_is_transposed_twice() -> None:
    found, report = apply_pass(_PASS, Plain)
    tvm.ir.assert_structural_equal(found, Expected)
    assert report.rewrites == 1


def test_other_operands_stay() -> None:
    assert_changes_nothing(ColumnsFirst(("turned",)), Plain)


def test_applied_twice() -> None:
    assert_changes_nothing(_PASS, Expected)
