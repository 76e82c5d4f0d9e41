"""DropCotangents: values that depend on absent cotangents alone become zeros."""

# ruff: noqa: ANN201, F841  (the Relax functions here are TVM script)

from __future__ import annotations

import pytest
import torch
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.relax_helpers import apply_pass, assert_becomes, compile_and_run
from tvmbridge.passes.relax.drop_cotangents import DropCotangents

DROP_B = DropCotangents(("a", "b"), ("b",))


@I.ir_module
class Before:
    @R.function
    def backward(
        x: R.Tensor((2, 3), "float64"), a: R.Tensor((2, 3), "float64"), b: R.Tensor((3,), "float64")
    ):
        with R.dataflow():
            slope = R.divide(R.const(1.0, "float64"), x)
            through_b = R.multiply(slope, b)
            parts = R.split(through_b, 3, axis=1)
            part = parts[0]
            through_a = R.multiply(slope, a)
            pair = (through_a, through_b)
            first = pair[0]
            second = pair[1]
            total = R.add(first, second)
            joined = R.concat((part, total), axis=1)
            gv = (total, joined, slope)
            R.output(gv)
        return gv


@I.ir_module
class Expected:
    @R.function
    def backward(x: R.Tensor((2, 3), "float64"), a: R.Tensor((2, 3), "float64")):
        with R.dataflow():
            b = R.zeros((3,), "float64")
            slope = R.divide(R.const(1.0, "float64"), x)
            through_b = R.zeros((2, 3), "float64")
            parts_0 = R.zeros((2, 1), "float64")
            parts_1 = R.zeros((2, 1), "float64")
            parts_2 = R.zeros((2, 1), "float64")
            parts = (parts_0, parts_1, parts_2)
            part = R.zeros((2, 1), "float64")
            through_a = R.multiply(slope, a)
            pair = (through_a, through_b)
            first = pair[0]
            second = R.zeros((2, 3), "float64")
            total = R.add(first, second)
            joined = R.concat((part, total), axis=1)
            gv = (total, joined, slope)
            R.output(gv)
        return gv


def test_before_and_expected() -> None:
    reason = "it reads a cotangent that arrives"
    declined = [f"{name}: {reason}" for name in ("pair", "total", "joined")]
    assert_becomes(DROP_B, Before, Expected, 4, declined)


def test_numbers_where_zero_times_infinity_is_nan() -> None:
    after, _ = apply_pass(DROP_B, Before)
    x = torch.tensor([[0.0, 1.0, 2.0], [-0.0, 4.0, 5.0]], dtype=torch.float64)
    a = torch.ones(2, 3, dtype=torch.float64)
    with_zeros = compile_and_run(Before, x, a, torch.zeros_like(a[0]), name="backward")
    assert with_zeros[0].isnan().any()
    results = compile_and_run(after, x, a, name="backward")
    expected = [1 / x, torch.cat([torch.zeros(2, 1), 1 / x], 1), 1 / x]
    torch.testing.assert_close(results, expected)


def test_of_parameters_of_one_name_the_last_is_the_cotangent() -> None:
    x, a, b = (relax.Var(name, relax.TensorType((3,), "float64")) for name in ("b", "a", "b"))
    builder = relax.BlockBuilder()
    with builder.function("backward", [x, a, b]):
        with builder.dataflow():
            product = builder.emit(relax.op.multiply(x, a))
            output = builder.emit_output(relax.Tuple([product]))
        builder.emit_func_output(output)
    after, report = apply_pass(DROP_B, builder.get())
    assert [p.name for p in after["backward"].params] == ["b", "a"]
    assert report.rewrites == 0


def test_what_is_no_static_tensor_is_an_error() -> None:
    length = tvm.tirx.Var("n", "int64")
    b = relax.Var("b", relax.TensorType((length,), "float64"))
    builder = relax.BlockBuilder()
    with builder.function("backward", [b]):
        with builder.dataflow():
            output = builder.emit_output(relax.op.negative(b))
        builder.emit_func_output(output)
    with pytest.raises(ValueError, match="b is no tensor of static shape"):
        apply_pass(DROP_B, builder.get())
