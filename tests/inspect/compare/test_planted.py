"""Planted faults: comparison finds each at its stage, and names the operator and its line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import tvm
from torch import nn
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tests.inspect.compare.models import Block
from tvmbridge import ComparisonReport, Departure, NumericsError, compare
from tvmbridge.frontend.registry import CONVERTERS
from tvmbridge.legalize import LEGALIZE_MAP
from tvmbridge.legalize.elementwise import unary_float
from tvmbridge.passes.base import PassReport, RelaxPass, map_functions
from tvmbridge.passes.relax.lower_dropout import LowerDropout
from tvmbridge.passes.relax.normalizations import Formulas

aten = torch.ops.aten

# All stages before the compiled code, for faults that appear earlier.
GRAPHS = ("captured", "imported", "passes")


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, 12, requires_grad=True)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that replaces the converter of an operator."""

    def replace_converter(operator: Any, wrong: Callable[..., Any]) -> None:
        monkeypatch.setitem(CONVERTERS, operator, replace(CONVERTERS[operator], function=wrong))

    return replace_converter


def mistake(module: nn.Module, x: torch.Tensor, **arguments: Any) -> Departure:
    """Compare a faulty module; return the first mistake, after checks of the report's error."""
    report = compare(module, x, **arguments)
    assert not report.ok
    assert report.first is not None, str(report)
    with pytest.raises(NumericsError) as caught:
        report.raise_for_mistakes()
    for named in (report.first.value, report.first.stage, report.first.operator):
        assert named in str(caught.value)
        assert named in str(report)
    return report.first


def test_gelu_by_tanh(plant: Callable[..., None], x: torch.Tensor) -> None:
    plant(aten.gelu.default, lambda ctx, node, x, **_: relax.op.nn.gelu_tanh(ctx.value(x)))
    found = mistake(Block(), x, backward=False, stages=GRAPHS)
    assert (found.value, found.stage) == ("output", "imported")
    assert found.operator == "aten.gelu.default"
    assert found.becomes.startswith("relax.nn.gelu_tanh")
    assert "hidden = nn.functional.gelu(self.first(x))" in found.source
    assert 1e-5 < found.error < 1e-2
    # Unlike rounding, a mistake is as large in float64.
    assert found.error_float64 == pytest.approx(found.error, rel=0.05)


def test_a_mistake_is_listed_where_it_comes_in(plant: Callable[..., None], x: torch.Tensor) -> None:
    plant(aten.gelu.default, lambda ctx, node, x, **_: relax.op.nn.gelu_tanh(ctx.value(x)))
    report = compare(Block(), x, stages=GRAPHS)
    outputs = [d.stage for d in report.mistakes if d.value == "output"]
    assert outputs == ["imported"]
    assert report.figure("output", "captured").verdict == "agrees"
    assert report.figure("output", "split").verdict == "mistake"
    # Gradients first appear at the stage Gradient, where the same operator makes them wrong.
    gradients = [d for d in report.mistakes if d.value.startswith("gradient of first")]
    assert {d.stage for d in gradients} == {"Gradient"}
    assert all("aten.gelu.default" in d.operator for d in gradients)


def test_a_wrong_epsilon_in_a_converter(plant: Callable[..., None], x: torch.Tensor) -> None:
    right = CONVERTERS[aten.native_layer_norm.default].function

    def wrong(ctx: Any, node: Any, x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
        return right(ctx, node, x, shape, weight, bias, 1.01e-5)

    plant(aten.native_layer_norm.default, wrong)
    found = mistake(Block().eval(), x, backward=False, stages=("imported",))
    assert (found.stage, found.operator) == ("imported", "aten.native_layer_norm.default")
    assert found.becomes.startswith("relax.nn.layer_norm")
    # An epsilon that is 1% off changes less than float32 rounding; float64 shows the error.
    assert found.error < 1e-6
    assert found.error_float64 is not None
    assert found.error_float64 > 1e-9


def test_a_wrong_epsilon_in_a_pass(monkeypatch: pytest.MonkeyPatch, x: torch.Tensor) -> None:
    right = Formulas.standardized

    def wrong(self: Formulas, x: Any, axes: Any, epsilon: float) -> Any:
        return right(self, x, axes, 1.01 * epsilon)

    monkeypatch.setattr(Formulas, "standardized", wrong)
    found = mistake(Block(), x, stages=GRAPHS)
    assert (found.value, found.stage) == ("output", "LowerLayerNorm")
    assert found.operator == "relax.nn.layer_norm"
    assert "relax.rsqrt" in found.becomes
    assert "self.norm(x + self.drop(hidden))" in found.source


def test_exchanged_masks(monkeypatch: pytest.MonkeyPatch, x: torch.Tensor) -> None:
    right = LowerDropout.apply

    def wrong(self: LowerDropout, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def exchange(function: relax.Function) -> relax.Function:
            *others, first, second = function.params
            parameters = [*others, second, first]
            return relax.Function(
                parameters, function.body, function.ret_ty, function.is_pure, function.attrs
            )

        return map_functions(right(self, mod, report), exchange)

    monkeypatch.setattr(LowerDropout, "apply", wrong)
    found = mistake(Block(), x, stages=GRAPHS)
    assert (found.value, found.stage) == ("output", "LowerDropout")
    assert found.operator == "relax.nn.dropout"
    assert "self.drop(hidden)" in found.source


def test_a_transposed_weight(plant: Callable[..., None], x: torch.Tensor) -> None:
    def wrong(ctx: Any, node: Any, x: Any, weight: Any, bias: Any = None) -> Any:
        product = ctx.emit(relax.op.matmul(ctx.value(x), ctx.value(weight)))
        return relax.op.add(product, ctx.value(bias))

    plant(aten.linear.default, wrong)
    found = mistake(Block(), x, stages=("captured", "imported"))
    assert (found.value, found.stage) == ("output", "imported")
    assert found.operator == "aten.linear.default"
    assert found.becomes.startswith("relax.matmul")
    assert "self.first(x)" in found.source


@pytest.mark.usefixtures("lost_scale")
def test_a_lost_scale_in_a_gradient_rule(x: torch.Tensor) -> None:
    report = compare(Block(), x, stages=GRAPHS)
    assert not report.ok
    assert {(d.stage, d.operator) for d in report.mistakes} == {
        ("Gradient", "gradient of aten.tanh.default")
    }
    assert all("torch.tanh(self.second(hidden))" in d.source for d in report.mistakes)
    wrong = {d.value for d in report.mistakes}
    assert "gradient of second.bias" in wrong
    assert "gradient of input 0" in wrong
    assert "output" not in wrong


@dataclass(frozen=True)
class HalveTanh(RelaxPass):
    """A user's pass that is wrong: it turns tanh(x) into tanh(x / 2)."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return map_functions(mod, lambda f: _Halver().visit_expr(f))


@mutator
class _Halver(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if call.op != tvm.ir.Op.get("relax.tanh"):
            return call
        half = relax.const(0.5, str(call.ty.dtype))
        return relax.op.tanh(self.builder_.emit(relax.op.multiply(call.args[0], half)))


def test_a_wrong_pass_of_the_users(x: torch.Tensor) -> None:
    found = mistake(Block(), x, backward=False, stages=GRAPHS, passes=[HalveTanh()])
    assert (found.value, found.stage, found.operator) == ("output", "HalveTanh", "relax.tanh")
    assert found.becomes.startswith("relax.multiply, relax.tanh")
    assert "torch.tanh(self.second(hidden))" in found.source


def test_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch, x: torch.Tensor) -> None:
    monkeypatch.setitem(LEGALIZE_MAP, "relax.tanh", unary_float("sigmoid"))
    found = mistake(Block(), x, backward=False, stages=("captured", "passes", "compiled"))
    assert (found.value, found.stage, found.operator) == ("output", "compiled", "relax.tanh")
    assert "torch.tanh(self.second(hidden))" in found.source
    # The report lists the kernels that lead to the value, including the wrong kernel.
    assert "tir_sigmoid" in found.becomes


@pytest.mark.slow
def test_a_wrong_kernel_in_backward_alone(monkeypatch: pytest.MonkeyPatch, x: torch.Tensor) -> None:
    # In this module only the gradient of gelu has an exponential.
    monkeypatch.setitem(LEGALIZE_MAP, "relax.exp", unary_float("sigmoid"))
    report: ComparisonReport = compare(Block(), x, stages=("passes", "compiled"))
    assert {(d.stage, d.operator) for d in report.mistakes} == {("compiled", "relax.exp")}
    assert {d.value for d in report.mistakes} == {
        "gradient of first.weight",
        "gradient of first.bias",
        "gradient of input 0",
    }
