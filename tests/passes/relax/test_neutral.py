"""OneZapp and ZeroZapp remove products with ones and sums with zeros."""

# ruff: noqa: ANN201  (the Relax functions here are TVM script)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
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
from tvmbridge.passes.base import RelaxPass
from tvmbridge.passes.relax.one_zapp import OneZapp
from tvmbridge.passes.relax.zero_zapp import ZeroZapp

op = relax.op


@I.ir_module
class Ones:
    @R.function
    def main(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3,), "float32")):
        with R.dataflow():
            ones = R.ones(R.shape([2, 3]), dtype="float32")
            left = R.multiply(ones, x)
            right = R.multiply(left, R.const(1.0, "float32"))
            quotient = R.divide(right, ones)
            wide = R.multiply(ones, w)
            inverse = R.divide(ones, quotient)
            y = R.add(inverse, wide)
            R.output(y)
        return y


@I.ir_module
class WithoutOnes:
    @R.function
    def main(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3,), "float32")):
        with R.dataflow():
            ones = R.ones(R.shape([2, 3]), dtype="float32")
            left = x
            right = left
            quotient = right
            wide = R.broadcast_to(w, R.shape([2, 3]))
            inverse = R.divide(ones, quotient)
            y = R.add(inverse, wide)
            R.output(y)
        return y


@I.ir_module
class Zeros:
    @R.function
    def main(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3,), "float32")):
        with R.dataflow():
            zeros = R.zeros(R.shape([2, 3]), dtype="float32")
            left = R.add(zeros, x)
            right = R.add(left, R.const([0.0, 0.0, 0.0], "float32"))
            less = R.subtract(right, zeros)
            wide = R.add(w, zeros)
            minus = R.subtract(zeros, less)
            product = R.multiply(minus, zeros)
            total = R.add(wide, minus)
            y = R.add(total, product)
            R.output(y)
        return y


@I.ir_module
class WithoutZeros:
    @R.function
    def main(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3,), "float32")):
        with R.dataflow():
            zeros = R.zeros(R.shape([2, 3]), dtype="float32")
            left = x
            right = left
            less = right
            wide = R.broadcast_to(w, R.shape([2, 3]))
            minus = R.subtract(zeros, less)
            product = R.multiply(minus, zeros)
            total = R.add(wide, minus)
            y = R.add(total, product)
            R.output(y)
        return y


@I.ir_module
class TimesOne:
    @R.function
    def main(x: R.Tensor(("n",), "float32")):
        with R.dataflow():
            y = R.multiply(x, R.const(1.0, "float32"))
            R.output(y)
        return y


@I.ir_module
class PlusZero:
    @R.function
    def main(x: R.Tensor(("n",), "float32")):
        with R.dataflow():
            y = R.add(R.const(0.0, "float32"), x)
            R.output(y)
        return y


@dataclass(frozen=True)
class Twin:
    """The test data of a pass that removes ``combine(fill(shape, dtype), x)``.

    - ``before``, ``expected``: a module, and the result of the pass.
    - ``declined``: a module that the pass declines, because its shape is not static.
    - ``operator``, ``formula``: the Relax operator that is removed, and its function in PyTorch.
    - ``almost``: numbers that are nearly neutral, and must stay.
    """

    pass_: RelaxPass
    before: tvm.IRModule
    expected: tvm.IRModule
    declined: tvm.IRModule
    operator: str
    combine: Callable[..., relax.Expr]
    fill: Callable[..., relax.Expr]
    formula: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    almost: tuple[float, ...]


TWINS = {
    "one": Twin(
        pass_=OneZapp(),
        before=Ones,
        expected=WithoutOnes,
        declined=TimesOne,
        operator="relax.multiply",
        combine=op.multiply,
        fill=op.ones,
        formula=lambda x, w: 1 / x + w,
        almost=(1.0000001, 0.0, -1.0, float("nan")),
    ),
    "zero": Twin(
        pass_=ZeroZapp(cotangents=("x", "x0", "w")),
        before=Zeros,
        expected=WithoutZeros,
        declined=PlusZero,
        operator="relax.add",
        combine=op.add,
        fill=op.zeros,
        formula=lambda x, w: w - x,
        almost=(1e-45, 1.0, float("nan")),
    ),
}


@pytest.fixture(params=TWINS)
def twin(request: pytest.FixtureRequest) -> Twin:
    return TWINS[request.param]


def test_neutral_operands_go_away(twin: Twin) -> None:
    after, report = apply_pass(twin.pass_, twin.before)
    tvm.ir.assert_structural_equal(after, twin.expected)
    assert (report.rewrites, report.declined) == (4, [])


def test_declines_with_the_reason(twin: Twin) -> None:
    after, report = apply_pass(twin.pass_, twin.declined)
    tvm.ir.assert_structural_equal(after, twin.declined)
    assert report.rewrites == 0
    assert report.declined == [f"{twin.operator}: the shape is not static"]


def test_agrees_with_pytorch_in_float64(twin: Twin) -> None:
    x, w = torch.randn(2, 3), torch.randn(3)
    (result,) = compile_and_run(twin.pass_(twin.before), x, w)
    expected = twin.formula(x.double(), w.double())
    torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-6)


def test_applied_twice_changes_nothing(twin: Twin) -> None:
    once = twin.pass_(twin.before)
    assert_changes_nothing(twin.pass_, once)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64])
def test_holds_for_every_number(twin: Twin, dtype: torch.dtype) -> None:
    x = torch.tensor([[-3, 0, 7], [1, 2**24, -(2**24)]]).to(dtype)
    if dtype.is_floating_point:
        x[0, 0], x[0, 2] = float("nan"), -float("inf")
    name = str(dtype).removeprefix("torch.")
    mod = build_main((x,), lambda x: twin.combine(twin.fill((2, 3), name), x))
    after = twin.pass_(mod)
    assert twin.operator not in operators(after)
    (result,) = compile_and_run(after, x)
    torch.testing.assert_close(result, x, rtol=0, atol=0, equal_nan=True)


def test_what_is_only_almost_neutral_stays(twin: Twin) -> None:
    for almost in twin.almost:
        mod = build_main(
            (torch.ones(3),), lambda x, a=almost: twin.combine(x, relax.const(a, "float32"))
        )
        tvm.ir.assert_structural_equal(twin.pass_(mod), mod)


def test_one_other_element_is_enough_to_stay(twin: Twin) -> None:
    values = [float(isinstance(twin.pass_, OneZapp))] * 2 + [twin.almost[0]]
    mod = build_main((torch.ones(3),), lambda x: twin.combine(x, relax.const(values, "float32")))
    tvm.ir.assert_structural_equal(twin.pass_(mod), mod)


def test_ones_that_are_cut_from_other_numbers_are_no_ones() -> None:
    """Check that no uniform value is followed through a cast, which may change the value."""
    half = relax.const(0.5, "float64")
    mod = build_main(
        (torch.ones(3, dtype=torch.int64),),
        lambda x: op.add(op.full((3,), half, "int64"), op.multiply(x, op.astype(half, "int64"))),
    )
    tvm.ir.assert_structural_equal(OneZapp()(mod), mod)


def test_both_operands_ones() -> None:
    mod = build_main((), lambda: op.multiply(op.ones((3, 1), "float64"), op.ones((4,), "float64")))
    (result,) = compile_and_run(OneZapp()(mod))
    assert torch.equal(result, torch.ones(3, 4, dtype=torch.float64))


def test_the_sign_of_zero_stays_where_nothing_is_a_gradient() -> None:
    x = torch.tensor([-0.0, 0.0, 1.0], dtype=torch.float64)

    def forward(x: relax.Expr) -> list[relax.Expr]:
        zero, negative = relax.const(0.0, "float64"), relax.const(-0.0, "float64")
        kept = [op.add(x, zero), op.add(zero, x), op.subtract(x, negative)]
        gone = [op.add(x, negative), op.subtract(x, zero)]
        return [op.divide(relax.const(1.0, "float64"), v) for v in (*kept, *gone)]

    after, report = apply_pass(ZeroZapp(cotangents=("y",)), build_main((x,), forward))
    assert report.rewrites == 2
    assert operators(after).count("relax.add") == 2
    results = compile_and_run(after, x)
    for result, value in zip(results, [x + 0.0] * 3 + [x] * 2, strict=True):
        torch.testing.assert_close(result, 1 / value, rtol=0, atol=0)
