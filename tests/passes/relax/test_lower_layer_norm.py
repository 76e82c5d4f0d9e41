"""LowerLayerNorm: mean, variance and scale spelled out."""

# ruff: noqa: ANN201  (the Relax functions here are TVM script)

from __future__ import annotations

import pytest
import torch
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.relax_helpers import apply_pass, build_main, compile_and_run, fingerprint
from tvmbridge.passes.relax.lower_layer_norm import LowerLayerNorm


@I.ir_module
class Before:
    @R.function
    def main(
        x: R.Tensor((2, 3, 4), "float32"),
        gamma: R.Tensor((4,), "float32"),
        beta: R.Tensor((4,), "float32"),
    ):
        with R.dataflow():
            y = R.nn.layer_norm(x, gamma, beta, axes=[-1], epsilon=1e-5)
            R.output(y)
        return y


@I.ir_module
class Expected:
    @R.function
    def main(
        x: R.Tensor((2, 3, 4), "float32"),
        gamma: R.Tensor((4,), "float32"),
        beta: R.Tensor((4,), "float32"),
    ):
        with R.dataflow():
            mean = R.mean(x, axis=[2], keepdims=True)
            centered = R.subtract(x, mean)
            squares = R.multiply(centered, centered)
            variance = R.mean(squares, axis=[2], keepdims=True)
            shifted = R.add(variance, R.const(1e-5, "float32"))
            scale = R.rsqrt(shifted)
            normed = R.multiply(centered, scale)
            scaled = R.multiply(normed, gamma)
            y = R.add(scaled, beta)
            R.output(y)
        return y


@I.ir_module
class Declined:
    @R.function
    def main(
        x: R.Tensor((2, 3, 3), "float32"),
        gamma: R.Tensor((3,), "float32"),
        beta: R.Tensor((3,), "float32"),
    ):
        with R.dataflow():
            y = R.nn.layer_norm(x, gamma, beta, axes=[1], epsilon=1e-5)
            R.output(y)
        return y


def test_is_spelled_out() -> None:
    after, report = apply_pass(LowerLayerNorm(), Before)
    tvm.ir.assert_structural_equal(after, Expected)
    assert (report.rewrites, report.declined) == (1, [])


def test_declines_with_the_reason() -> None:
    after, report = apply_pass(LowerLayerNorm(), Declined)
    tvm.ir.assert_structural_equal(after, Declined)
    assert report.declined == ["nn.layer_norm: the axes are not the last ones, in order"]


def test_leaves_its_input_untouched() -> None:
    before = fingerprint(Before)
    LowerLayerNorm()(Before)
    assert fingerprint(Before) == before


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("scale", "center"), [(True, True), (False, True), (True, False)])
def test_agrees_with_pytorch_in_float64(count: int, scale: bool, center: bool) -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64) * 5 + 100
    shape = x.shape[-count:]
    gamma, beta = torch.randn(2, *shape, dtype=torch.float64)
    axes = list(range(-count, 0))
    mod = build_main(
        (x, gamma, beta),
        lambda x, g, b: relax.op.nn.layer_norm(x, g, b, axes, 1e-3, center, scale),
    )
    expected = torch.nn.functional.layer_norm(
        x, shape, gamma if scale else None, beta if center else None, 1e-3
    )
    (result,) = compile_and_run(LowerLayerNorm()(mod), x, gamma, beta)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_applied_twice_changes_nothing() -> None:
    once = LowerLayerNorm()(Before)
    twice, report = apply_pass(LowerLayerNorm(), once)
    tvm.ir.assert_structural_equal(twice, once)
    assert report.rewrites == 0
