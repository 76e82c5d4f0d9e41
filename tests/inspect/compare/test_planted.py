"""Planted mistakes: each is found, at the right stage, with the right operator."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import tvm
from torch import nn
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge import Departure, NumericsError, compare
from tvmbridge.frontend.registry import CONVERTERS
from tvmbridge.legalize import LEGALIZE_MAP
from tvmbridge.legalize.elementwise import unary_float
from tvmbridge.passes.base import PassReport, RelaxPass, map_functions
from tvmbridge.passes.relax import lower_dropout, lower_layer_norm

aten = torch.ops.aten


class Block(nn.Module):
    """Linear, activation, dropout and norm, twice; square weights."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.drop, self.drop_again = nn.Dropout(0.3), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.first(x))
        hidden = self.norm(x + self.drop(hidden))
        return hidden + self.drop_again(torch.tanh(self.second(hidden)))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, 12, requires_grad=True)


def first_mistake(module: nn.Module, x: torch.Tensor, **kwargs: object) -> Departure:
    report = compare(module, x, **kwargs)  # type: ignore[arg-type]
    assert not report.ok
    assert report.first is not None, str(report)
    with pytest.raises(NumericsError, match=report.first.stage):
        report.raise_for_mistakes()
    return report.first


def plant_converter(monkeypatch: pytest.MonkeyPatch, op: torch._ops.OpOverload, wrong) -> None:
    monkeypatch.setitem(CONVERTERS, op, replace(CONVERTERS[op], function=wrong))


@pytest.mark.parametrize("backward", [False, True])
def test_gelu_by_tanh(monkeypatch: pytest.MonkeyPatch, x: torch.Tensor, backward: bool) -> None:
    plant_converter(
        monkeypatch, aten.gelu.default, lambda ctx, node, x, **_: relax.op.nn.gelu_tanh(ctx.value(x))
    )
    found = first_mistake(Block(), x, backward=backward)
    assert (found.value, found.stage) == ("output", "imported")
    assert (found.operator, found.becomes.split(",")[0]) == (
        "aten.gelu.default",
        "relax.nn.gelu_tanh",
    )
    assert "hidden = nn.functional.gelu(self.first(x))" in found.source
    # The article's story: the departure does not shrink with the precision.
    assert 1e-6 < found.error < 1e-2
    assert found.error_float64 == pytest.approx(found.error, rel=0.05)


def test_a_wrong_epsilon_in_a_pass(monkeypatch: pytest.MonkeyPatch, x: torch.Tensor) -> None:
    definition = lower_layer_norm._LayerNormMutator._definition

    def wrong(self, call, axes):
        other = relax.op.nn.layer_norm(*call.args, axes, 1e-6)
        return definition(self, other, axes)

    monkeypatch.setattr(lower_layer_norm._LayerNormMutator, "_definition", wrong)
    found = first_mistake(Block(), x)
    assert (found.value, found.stage) == ("output", "LowerLayerNorm")
    assert found.operator == "relax.nn.layer_norm"
    assert "self.norm(x + self.drop(hidden))" in found.source


def test_a_wrong_epsilon_in_a_converter(monkeypatch: pytest.MonkeyPatch, x: torch.Tensor) -> None:
    right = CONVERTERS[aten.native_layer_norm.default].function

    def wrong(ctx, node, x, shape, weight, bias, eps):
        return right(ctx, node, x, shape, weight, bias, 1.2e-5)

    plant_converter(monkeypatch, aten.native_layer_norm.default, wrong)
    found = first_mistake(Block().eval(), x, backward=False)
    assert (found.stage, found.operator) == ("imported", "aten.native_layer_norm.default")
    assert found.becomes == "relax.nn.layer_norm, relax.permute_dims" or found.becomes.startswith("relax.nn.layer_norm")


def test_exchanged_masks(monkeypatch: pytest.MonkeyPatch, x: torch.Tensor) -> None:
    lower = lower_dropout.LowerDropout.apply

    def wrong(self, mod, report):
        mod = lower(self, mod, report)
        def swap(f):
            *rest, a, b = f.params
            return relax.Function([*rest, b, a], f.body, f.ret_ty, f.is_pure, f.attrs)
        return map_functions(mod, swap)

    monkeypatch.setattr(lower_dropout.LowerDropout, "apply", wrong)
    found = first_mistake(Block(), x)
    assert (found.value, found.stage, found.operator) == (
        "output", "LowerDropout", "relax.nn.dropout",
    )
    assert "self.drop(hidden)" in found.source


def test_a_transposed_weight(monkeypatch: pytest.MonkeyPatch, x: torch.Tensor) -> None:
    def wrong(ctx, node, x, weight, bias=None):
        product = ctx.emit(relax.op.matmul(ctx.value(x), ctx.value(weight)))
        return relax.op.add(product, ctx.value(bias))

    plant_converter(monkeypatch, aten.linear.default, wrong)
    found = first_mistake(Block(), x)
    assert (found.stage, found.operator) == ("imported", "aten.linear.default")
    assert found.becomes.startswith("relax.matmul")
    assert "self.first(x)" in found.source


@pytest.fixture
def lost_scale():
    """tanh's rule without its factor 2: d tanh = 1 - y^2 becomes 1 - y^2/2."""
    def wrong(var, call, ct, builder):
        one = relax.const(1.0, str(call.ty.dtype)); half = relax.const(0.5, str(call.ty.dtype))
        square = relax.op.multiply(relax.op.multiply(var, var), half)
        return [relax.op.multiply(ct, relax.op.subtract(one, square))]
    op = tvm.ir.Op.get("relax.tanh")
    before = op.get_attr("FPrimalGradient")
    relax.op.register_gradient("relax.tanh", wrong, level=30)
    yield
    op.reset_attr("FPrimalGradient"); relax.op.register_gradient("relax.tanh", before, level=10)


@pytest.mark.usefixtures("lost_scale")
def test_a_lost_scale_in_a_gradient_rule(x: torch.Tensor) -> None:
    report = compare(Block(), x)
    found = report.first
    assert found is not None
    assert found.stage == "Gradient"
    assert {d.operator for d in report.mistakes} == {"gradient of aten.tanh.default"}
    assert "torch.tanh(self.second(hidden))" in found.source
    assert "output" not in {d.value for d in report.mistakes}
    assert "gradient of second.bias" in {d.value for d in report.mistakes}


@dataclass(frozen=True)
class HalveTanh(RelaxPass):
    """A user's pass that is wrong: tanh(x) becomes tanh(x / 2)."""

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


@pytest.mark.parametrize("backward", [False, True])
def test_a_wrong_pass_of_the_users(x: torch.Tensor, backward: bool) -> None:
    found = first_mistake(Block(), x, backward=backward, passes=[HalveTanh()])
    assert (found.value, found.stage, found.operator) == ("output", "HalveTanh", "relax.tanh")
    assert found.becomes.startswith("relax.multiply, relax.tanh")
    assert "torch.tanh" in found.source


@pytest.mark.parametrize("backward", [False, True])
def test_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch, x: torch.Tensor, backward: bool) -> None:
    monkeypatch.setitem(LEGALIZE_MAP, "relax.tanh", unary_float("sigmoid"))
    found = first_mistake(Block(), x, backward=backward)
    assert (found.value, found.stage, found.operator) == ("output", "compiled", "relax.tanh")
    assert "torch.tanh" in found.source
