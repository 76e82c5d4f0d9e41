"""LiftPackedWeights: a concatenation of parameters becomes one parameter."""

# ruff: noqa: ANN201  (the Relax functions here are TVM script)

from __future__ import annotations

import torch
from tvm.script import ir as I
from tvm.script import relax as R

from tests.relax_helpers import assert_becomes, compile_and_run
from tvmbridge.passes.relax.lift_packed_weights import LiftPackedWeights, concatenated_parameters


@I.ir_module
class Before:
    @R.function
    def main(
        x: R.Tensor((3, 4), "float64"),
        a: R.Tensor((4, 4), "float64"),
        b: R.Tensor((2, 4), "float64"),
        ct: R.Tensor((6, 4), "float64"),
    ):
        with R.dataflow():
            w = R.concat((a, b), axis=0)
            y = R.matmul(x, R.permute_dims(w))
            again = R.concat((a, b), axis=0)
            z = R.multiply(again, ct)
            reverse = R.concat((b, a), axis=0)
            columns = R.concat((x, x), axis=1)
            gv = (y, z, reverse, columns)
            R.output(gv)
        return gv


@I.ir_module
class Expected:
    @R.function
    def main(
        x: R.Tensor((3, 4), "float64"),
        a: R.Tensor((4, 4), "float64"),
        b: R.Tensor((2, 4), "float64"),
        packed_0: R.Tensor((6, 4), "float64"),
        ct: R.Tensor((6, 4), "float64"),
    ):
        with R.dataflow():
            y = R.matmul(x, R.permute_dims(packed_0))
            z = R.multiply(packed_0, ct)
            reverse = R.concat((b, a), axis=0)
            columns = R.concat((x, x), axis=1)
            gv = (y, z, reverse, columns)
            R.output(gv)
        return gv


LIFT = LiftPackedWeights((("a", "b"),), position=3)


def test_concatenated_parameters_are_found() -> None:
    assert concatenated_parameters(Before["main"], {"a", "b"}) == (("a", "b"), ("b", "a"))
    assert concatenated_parameters(Before["main"], {"a"}) == ()


def test_they_become_a_parameter() -> None:
    assert_becomes(LIFT, Before, Expected, 2, ["b, a: not among the groups"])
    assert [p.name for p in LIFT(Before)["main"].params] == ["x", "a", "b", "packed_0", "ct"]


def test_agrees_with_pytorch_in_float64() -> None:
    x, a, b, ct = (torch.randn(n, 4, dtype=torch.float64) for n in (3, 4, 2, 6))
    packed = torch.cat([a, b])
    y, z, *_ = compile_and_run(LIFT(Before), x, a, b, packed, ct)
    torch.testing.assert_close(y, x @ packed.T, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(z, packed * ct, rtol=1e-13, atol=1e-13)
