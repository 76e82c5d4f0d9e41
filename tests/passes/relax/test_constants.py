"""uniform_value: the number that all elements of an expression are known to equal."""

from __future__ import annotations

import numpy
import pytest
from tvm import relax

from tvmbridge.passes.relax.constants import uniform_value

op = relax.op


def value_of(expr: relax.Expr) -> float | None:
    builder = relax.BlockBuilder()
    with builder.function("main", []):
        with builder.dataflow():
            var = builder.emit(expr)
            value = uniform_value(var, builder.lookup_binding)
            output = builder.emit_output(var)
        builder.emit_func_output(output)
    return value


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "int32", "bool", "bfloat16"])
def test_constants_of_one_value(dtype: str) -> None:
    for number in (0, 1):
        assert value_of(relax.const(number, dtype)) == number
        assert value_of(op.full((2, 3), relax.const(number, dtype), dtype)) == number
    assert value_of(op.ones((2,), dtype)) == 1.0
    assert value_of(op.zeros((2,), dtype)) == 0.0


def test_constants_of_several_values() -> None:
    assert value_of(relax.const(numpy.full((2, 3), 2.5, "float32"))) == 2.5
    assert value_of(relax.const(numpy.array([1.0, 1.0, 2.0], "float32"))) is None
    assert value_of(relax.const(numpy.ones((0, 3), "float32"))) is None


def test_nan_is_no_value() -> None:
    assert value_of(relax.const(float("nan"), "float32")) is None
    assert value_of(relax.const(numpy.full(3, numpy.nan, "float32"))) is None
    assert value_of(op.full((3,), relax.const(float("nan"), "float32"), "float32")) is None


def test_negative_zero_is_zero_and_infinity_is_itself() -> None:
    assert value_of(relax.const(-0.0, "float32")) == 0.0
    assert value_of(relax.const(float("inf"), "float32")) == float("inf")


def test_moves_keep_the_value_and_conversions_only_zero_and_one() -> None:
    two, one = relax.const(2.5, "float32"), relax.const(1.0, "float32")
    assert value_of(op.broadcast_to(two, (2, 3))) == 2.5
    assert value_of(op.reshape(op.broadcast_to(one, (2, 3)), (6,))) == 1.0
    assert value_of(op.expand_dims(one, 0)) == 1.0
    assert value_of(op.astype(one, "int64")) == 1.0
    assert value_of(op.astype(two, "int64")) is None
    assert value_of(op.full((2,), two, "int64")) is None


def test_variables_are_looked_up() -> None:
    var = relax.Var("v", relax.TensorType((), "float32"))
    assert uniform_value(var, lambda v: None) is None
    assert uniform_value(var, lambda v: relax.const(1.0, "float32")) == 1.0


def test_computed_values_are_unknown() -> None:
    one = relax.const(1.0, "float32")
    assert value_of(op.add(one, one)) is None
    assert value_of(relax.Tuple([one])) is None
