"""LowerDropout: each dropout becomes a product with a mask parameter, in program order."""

# ruff: noqa: ANN201  (the Relax functions here are TVM script)

from __future__ import annotations

import torch
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from tests.relax_helpers import (
    apply_pass,
    assert_changes_nothing,
    compile_and_run,
    operators,
)
from tvmbridge.passes.relax.lower_dropout import LowerDropout


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            lv = R.nn.dropout(x, rate=0.5)
            y = lv[0]
            R.output(y)
        return y


@I.ir_module
class Expected:
    @R.function
    def main(x: R.Tensor((2, 3), "float32"), dropout_mask_0: R.Tensor((2, 3), "bool")):
        with R.dataflow():
            keep = R.astype(dropout_mask_0, "float32")
            scaled = R.multiply(keep, R.const(2.0, "float32"))
            product = R.multiply(x, scaled)
            lv = (product, keep)
            y = lv[0]
            R.output(y)
        return y


@I.ir_module
class Several:
    @R.function
    def main(x: R.Tensor((2, 3), "float64"), w: R.Tensor((3,), "float64")):
        with R.dataflow():
            first = R.nn.dropout(x, rate=0.1)
            second = R.nn.dropout(x, rate=0.25)
            a = first[0]
            b = second[0]
            c = R.add(a, w)
            third = R.nn.dropout(c, rate=0.1)
            d = third[0]
            mask = third[1]
            gv = (a, b, d, mask)
            R.output(gv)
        return gv


@I.ir_module
class Declined:
    @R.function
    def main(x: R.Tensor(("n", 3), "float32"), y: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            symbolic = R.nn.dropout(x, rate=0.5)
            everything = R.nn.dropout(y, rate=1.0)
            nothing = R.nn.dropout(y, rate=0.0)
            gv = (symbolic[0], everything[0], nothing[0])
            R.output(gv)
        return gv


def test_becomes_a_product_with_a_mask() -> None:
    after, report = apply_pass(LowerDropout(), Before)
    tvm.ir.assert_structural_equal(after, Expected)
    assert report.rewrites == 1
    assert report.declined == []


def test_declines_with_the_reason() -> None:
    report = assert_changes_nothing(LowerDropout(), Declined)
    assert report.declined == [
        "nn.dropout: the shape is not static",
        "nn.dropout: the rate is 1",
        "nn.dropout: the rate is 0",
    ]


def test_agrees_with_the_definition_in_float64() -> None:
    after = LowerDropout()(Several)
    names = [p.name for p in after["main"].params]
    assert names == ["x", "w", "dropout_mask_0", "dropout_mask_1", "dropout_mask_2"]
    x, w = torch.randn(2, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    masks = [torch.rand(2, 3) > 0.5 for _ in range(3)]
    a, b, d, mask = compile_and_run(after, x, w, *masks)
    torch.testing.assert_close(a, x * masks[0] / 0.9, rtol=1e-14, atol=0)
    torch.testing.assert_close(b, x * masks[1] / 0.75, rtol=1e-14, atol=0)
    torch.testing.assert_close(d, (a + w) * masks[2] / 0.9, rtol=1e-14, atol=0)
    assert torch.equal(mask, masks[2].double())


def test_applied_twice_changes_nothing() -> None:
    for module in (Before, Several):
        once = LowerDropout()(module)
        assert assert_changes_nothing(LowerDropout(), once).declined == []


def test_two_dropouts_of_one_tensor_have_a_mask_each() -> None:
    after, report = apply_pass(LowerDropout(), Several)
    assert report.rewrites == 3
    assert "relax.nn.dropout" not in operators(after)


def test_the_prefix_names_the_masks() -> None:
    after = LowerDropout(mask_prefix="kept_")(Before)
    assert after["main"].params[1].name == "kept_0"
