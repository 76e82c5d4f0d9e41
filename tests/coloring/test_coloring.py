"""Coloring: the values that forward and backward compute, and those kept, repeated or passed."""

# ruff: noqa: ANN201, F841  (the Relax functions here are TVM script)

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.models import transformer_joint
from tvmbridge.coloring import Coloring, color
from tvmbridge.differentiation.differentiate import JointModule
from tvmbridge.passes.base import dtype_of, flat_results


@I.ir_module
class Joint:
    @R.function
    def joint(
        x: R.Tensor((2, 3), "float32"),
        w: R.Tensor((4, 3), "float32"),
        m: R.Tensor((2, 4), "bool"),
        ct_0: R.Tensor((2, 4), "float32"),
    ):
        with R.dataflow():
            turned = R.permute_dims(w, axes=[1, 0])
            product = R.matmul(x, turned)
            value = R.tanh(product)
            keep = R.astype(m, "float32")
            scale = R.multiply(keep, R.const(2.0, "float32"))
            dropped = R.multiply(value, scale)
            ones = R.full(R.shape([2, 4]), R.const(1.0, "float32"), dtype="float32")
            flat = R.reshape(dropped, R.shape([8]))
            y = R.exp(flat)
            unread = R.negative(y)
            grad = R.multiply(ct_0, scale)
            back = R.reshape(y, R.shape([2, 4]))
            grown = R.multiply(grad, back)
            square = R.multiply(value, value)
            slope = R.subtract(ones, square)
            inner = R.multiply(grown, slope)
            grad_x = R.matmul(inner, w)
            gv = (y, ct_0, grad_x, x)
            R.output(gv)
        return gv


@pytest.fixture
def joint() -> JointModule:
    return JointModule(
        mod=Joint,
        primals=("x", "w", "m"),
        cotangents=("ct_0",),
        cotangent_of=(0,),
        num_outputs=1,
        wanted=("m", "x", "w"),
    )


def names(bindings: tuple[relax.Binding, ...]) -> list[str]:
    return [b.var.name for b in bindings]


def test_forward_is_what_the_outputs_depend_on(joint: JointModule) -> None:
    forward = ["turned", "product", "value", "keep", "scale", "dropped", "flat", "y"]
    assert names(color(joint).forward) == forward


def test_backward_is_what_else_the_gradients_depend_on(joint: JointModule) -> None:
    own = ["grad", "back", "grown", "square", "slope", "inner", "grad_x"]
    repeated = ["keep", "scale", "ones"]
    assert sorted(names(color(joint).backward)) == sorted([*own, *repeated])


def test_residuals_are_the_forward_values_that_backward_reads(joint: JointModule) -> None:
    assert [v.name for v in color(joint).residuals] == ["value", "y"]


def test_inputs_are_passed_and_not_kept(joint: JointModule) -> None:
    coloring = color(joint)
    assert [v.name for v in coloring.reads] == ["x", "w", "m"]
    assert not {v.name for v in coloring.residuals} & set(joint.primals)


def test_constants_and_light_functions_of_inputs_are_repeated(joint: JointModule) -> None:
    coloring = color(joint)
    both = set(names(coloring.forward)) & set(names(coloring.backward))
    assert both == {"keep", "scale"}
    assert "ones" in names(coloring.backward)


def test_bindings_keep_their_order_and_repeated_ones_come_late(joint: JointModule) -> None:
    order = [b.var.name for b in Joint["joint"].body.blocks[0].bindings]
    coloring = color(joint)
    assert names(coloring.forward) == [n for n in order if n in names(coloring.forward)]
    backward = ["keep", "scale", "grad", "back", "grown", "ones", "square", "slope", "inner"]
    assert names(coloring.backward) == [*backward, "grad_x"]


def check_closed(joint: JointModule, coloring: Coloring) -> None:
    """Assert that each binding reads only values that its side has."""
    function = joint.mod["joint"]
    primals = function.params[: len(joint.primals)]
    cotangents = function.params[len(joint.primals) :]
    results = flat_results(function)
    sides = (
        (primals, coloring.forward, results[: joint.num_outputs] + list(coloring.residuals)),
        (
            [*coloring.reads, *coloring.residuals, *cotangents],
            coloring.backward,
            results[joint.num_outputs :],
        ),
    )
    for inputs, bindings, wanted in sides:
        known = set(inputs)
        for binding in bindings:
            assert set(relax.analysis.free_vars(binding.value)) <= known, binding.var.name
            known.add(binding.var)
        assert {r for r in wanted if isinstance(r, relax.Var)} <= known


def test_each_side_has_all_it_reads(joint: JointModule) -> None:
    check_closed(joint, color(joint))
    joint = transformer_joint().joint
    check_closed(joint, color(joint))


def test_of_a_transformer_layer_only_what_is_dear_is_kept() -> None:
    joint = transformer_joint().joint
    coloring = color(joint)
    bound = {b.var: b.value for b in joint.mod["joint"].body.blocks[0].bindings}
    kept = {bound[v].op.name for v in coloring.residuals}
    views = {"relax.reshape", "relax.permute_dims", "relax.broadcast_to", "relax.expand_dims"}
    assert kept
    assert not kept & views
    assert all(dtype_of(v) == "float64" for v in coloring.residuals)
    masks = [v for v in coloring.reads if dtype_of(v) == "bool"]
    assert len(masks) == 2
    forward = set(names(coloring.forward))
    assert {v.name for v in coloring.residuals} <= forward


def test_nothing_runs_twice_but_what_is_free() -> None:
    joint = transformer_joint().joint
    coloring = color(joint)
    bound = {b.var: b.value for b in joint.mod["joint"].body.blocks[0].bindings}
    both = {b.var for b in coloring.forward} & {b.var for b in coloring.backward}
    repeated = {bound[v].op.name for v in both}
    assert repeated <= {
        "relax.reshape",
        "relax.permute_dims",
        "relax.broadcast_to",
        "relax.astype",
        "relax.multiply",
    }
    light = [v for v in both if bound[v].op.name == "relax.multiply"]
    operands = {o for v in light for o in relax.analysis.free_vars(bound[v])}
    assert all(
        isinstance(bound[o], relax.Call) and bound[o].op.name == "relax.astype" for o in operands
    )


def test_the_module_is_not_changed(joint: JointModule) -> None:
    before = Joint.script()
    color(joint)
    assert Joint.script() == before
    assert isinstance(joint.mod, tvm.IRModule)
