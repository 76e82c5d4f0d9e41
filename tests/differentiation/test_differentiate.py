"""Differentiation: refusals, and the simplification of the gradient by the zapp passes."""

# ruff: noqa: ANN201  (the Relax functions here are TVM script)

from __future__ import annotations

import pytest
import torch
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.models import transformer_joint
from tests.relax_helpers import build_main, compile_and_run, operators
from tvmbridge.core.errors import UnsupportedOperatorError
from tvmbridge.core.types import PassRecord
from tvmbridge.differentiation.differentiate import differentiate, missing_rules
from tvmbridge.kernels.aten_call import call_overload
from tvmbridge.passes.base import dtype_of, shape_of
from tvmbridge.passes.relax.constants import uniform_value

op = relax.op


@I.ir_module
class Layer:
    @R.function
    def main(
        x: R.Tensor((2, 3), "float64"), w: R.Tensor((4, 3), "float64"), b: R.Tensor((4,), "float64")
    ):
        with R.dataflow():
            transposed = R.permute_dims(w, axes=[1, 0])
            product = R.matmul(x, transposed)
            summed = R.add(product, b)
            y = R.exp(summed)
            gv = (y,)
            R.output(gv)
        return gv


@I.ir_module
class LayerJoint:
    @R.function
    def joint(
        x: R.Tensor((2, 3), "float64"),
        w: R.Tensor((4, 3), "float64"),
        b: R.Tensor((4,), "float64"),
        ct_0: R.Tensor((2, 4), "float64"),
    ):
        with R.dataflow():
            transposed = R.permute_dims(w, axes=[1, 0])
            product = R.matmul(x, transposed)
            summed = R.add(product, b)
            y = R.exp(summed)
            grad = R.multiply(ct_0, y)
            grad_b = R.sum(grad, axis=[0])
            grad_x = R.matmul(grad, w)
            turned = R.permute_dims(grad, axes=[1, 0])
            grad_w = R.matmul(turned, x)
            gv = (y, grad_x, grad_w, grad_b)
            R.output(gv)
        return gv


def joint_of(
    mod: tvm.IRModule, *wanted: str, records: list[PassRecord] | None = None
) -> tvm.IRModule:
    return differentiate(mod, wanted, [0], [] if records is None else records).mod


def test_the_joint_of_a_layer_holds_nothing_superfluous() -> None:
    joint = joint_of(Layer, "x", "w", "b")
    assert sorted(operators(joint)) == sorted(operators(LayerJoint))
    inputs = [torch.randn(s, dtype=torch.float64) for s in ((2, 3), (4, 3), (4,), (2, 4))]
    got = compile_and_run(joint, *inputs, name="joint")
    want = compile_and_run(LayerJoint, *inputs, name="joint")
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


def test_the_zapp_passes_halve_the_gradient_of_a_layer() -> None:
    records: list[PassRecord] = []
    joint_of(Layer, "x", "w", "b", records=records)
    gradient = next(r for r in records if r.name == "Gradient")
    assert gradient.bindings_before == 9  # 5 of the layer, 2 of the weighted sum, 2 results
    first = records[records.index(gradient) + 1]
    assert first.bindings_before >= 2 * records[-1].bindings_after
    assert records[-1].bindings_after == 10


def test_every_zapp_pass_that_is_needed_does_something() -> None:
    records = transformer_joint().records
    done: dict[str, int] = {}
    for record in records:
        done[record.name] = done.get(record.name, 0) + record.rewrites
        assert record.declined == ()
    for name in ("LowerDropout", "LowerLayerNorm", "StopGradients", "AppendCotangents"):
        assert done[name] > 0
    for name in ("RemoveNoGrad", "ZappLike", "OneZapp"):
        assert done[name] > 0


def test_nothing_superfluous_is_left_in_a_transformer_layer() -> None:
    function = transformer_joint().joint.mod["joint"]
    (block,) = function.body.blocks
    bound = {b.var: b.value for b in block.bindings}
    found = [f"{v.name} = {value}" for v, value in bound.items() if superfluous(value, bound)]
    assert found == []
    read = {v for value in bound.values() for v in relax.analysis.free_vars(value)}
    read |= set(relax.analysis.free_vars(function.body.body))
    assert [v.name for v in bound if v not in read] == []


def superfluous(value: relax.Expr, bound: dict[relax.Var, relax.Expr]) -> bool:
    """Whether a binding is redundant: its value is an operand, or known from a static shape."""
    if isinstance(value, relax.Var):
        return True
    if not isinstance(value, relax.Call):
        return False
    name = value.op.name
    if name.endswith("_like") or name in ("relax.collapse_sum_to", "relax.grad.no_grad"):
        return True
    if name in ("relax.broadcast_to", "relax.reshape", "relax.astype", "relax.sum"):
        source = value.args[0]
        return (shape_of(source), dtype_of(source)) == (shape_of(value), dtype_of(value))
    neutral = {"relax.multiply": 1.0, "relax.divide": 1.0, "relax.add": 0.0, "relax.subtract": 0.0}
    return name in neutral and any(uniform_value(a, bound.get) == neutral[name] for a in value.args)


def test_the_check_for_superfluous_bindings_finds_them() -> None:
    mod = build_main(
        (torch.ones(2, 3),),
        lambda x: [
            op.ones_like(x),
            op.collapse_sum_to(x, relax.ShapeExpr([3])),
            op.broadcast_to(x, (2, 3)),
            op.reshape(x, (2, 3)),
            op.astype(x, "float32"),
            op.multiply(x, op.ones((2, 3), "float32")),
            op.add(relax.const(0.0, "float32"), x),
            x,
        ],
    )
    bound = {b.var: b.value for b in mod["main"].body.blocks[0].bindings}
    assert sum(superfluous(value, bound) for value in bound.values()) == 8


def test_missing_rules_are_listed_by_name_all_at_once() -> None:
    x, i = torch.randn(2, 3), torch.tensor([1, 2])

    def formula(x: relax.Expr, i: relax.Expr) -> list[relax.Expr]:
        called = call_overload("aten.erfinv.default", [{"tensor": 0}], [x], x.ty)
        unread = call_overload("aten.cumsum.default", [{"tensor": 0}, 0], [i], i.ty)
        return [op.add(op.floor(x), op.cumsum(x, 1)), called, op.floor(x), op.floor(i), unread]

    mod = build_main((x, i), formula)
    names = ["relax.floor", "relax.cumsum", "aten.erfinv.default"]
    assert missing_rules(mod, ["x0"]) == names
    with pytest.raises(UnsupportedOperatorError) as caught:
        differentiate(mod, ["x0"], [0, 1, 2], [])
    assert all(name in str(caught.value) for name in names)
    assert "aten.cumsum" not in str(caught.value)


def test_rules_are_asked_for_only_where_gradients_flow() -> None:
    mod = build_main(
        (torch.randn(3), torch.randn(3)),
        lambda x, y: op.multiply(x, op.floor(y)),
    )
    assert missing_rules(mod, ["x0"]) == []
    assert missing_rules(mod, ["x1"]) == ["relax.floor"]


def test_outputs_without_a_gradient_are_refused() -> None:
    mod = build_main((torch.randn(3), torch.randn(3)), lambda x, y: op.exp(x))
    with pytest.raises(UnsupportedOperatorError, match="no output depends"):
        differentiate(mod, ["x1"], [0], [])


def test_only_floating_outputs_that_depend_on_something_wanted_have_a_cotangent() -> None:
    x, y, i = torch.randn(3).double(), torch.randn(3).double(), torch.tensor([1, 2, 3])
    mod = build_main(
        (x, y, i), lambda x, y, i: [op.add(i, i), op.exp(x), op.exp(y), op.multiply(x, y)]
    )
    joint = differentiate(mod, ["x0"], range(4), [])
    assert (joint.cotangents, joint.cotangent_of) == (("ct_1", "ct_3"), (1, 3))
    assert (joint.primals, joint.wanted, joint.num_outputs) == (("x0", "x1", "x2"), ("x0",), 4)
    first, second = torch.randn(2, 3).double()
    *_, gradient = compile_and_run(joint.mod, x, y, i, first, second, name="joint")
    torch.testing.assert_close(gradient, first * x.exp() + second * y, rtol=1e-13, atol=1e-13)


def test_an_output_returned_twice_takes_both_cotangents_and_unused_inputs_zero() -> None:
    x, y = torch.randn(2, 3).double()
    mod = build_main((x, y), lambda x, y: [op.exp(x), op.exp(x), x])
    joint = differentiate(mod, ["x0", "x1"], range(3), [])
    cotangents = torch.randn(3, 3).double()
    *_, of_x, of_y = compile_and_run(joint.mod, x, y, *cotangents, name="joint")
    expected = (cotangents[0] + cotangents[1]) * x.exp() + cotangents[2]
    torch.testing.assert_close(of_x, expected, rtol=1e-13, atol=1e-13)
    assert torch.equal(of_y, torch.zeros_like(y))


def test_the_module_stays_as_it_was() -> None:
    before = Layer.script()
    joint_of(Layer, "x")
    assert Layer.script() == before
