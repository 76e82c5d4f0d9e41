"""The split of a joint function into forward and backward, which together compute the same."""

# ruff: noqa: ANN201  (the Relax functions here are TVM script)

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.models import transformer_joint
from tests.relax_helpers import CompiledFunctions, build_main, operators
from tvmbridge.coloring import color
from tvmbridge.compiler.split import SplitModule, split
from tvmbridge.differentiation.differentiate import JointModule, differentiate
from tvmbridge.kernels.dtypes import from_relax_dtype
from tvmbridge.passes.base import dtype_of, flat_results, shape_of

op = relax.op


@I.ir_module
class Joint:
    @R.function
    def joint(
        x: R.Tensor((2, 4), "float64"),
        m: R.Tensor((2, 4), "bool"),
        ct_0: R.Tensor((8,), "float64"),
        ct_1: R.Tensor((2, 4), "float64"),
    ):
        with R.dataflow():
            twos = R.full(R.shape([2, 4]), R.const(2.0, "float64"), dtype="float64")
            value = R.tanh(x)
            scaled = R.multiply(value, twos)
            keep = R.astype(m, "float64")
            second = R.multiply(scaled, keep)
            root = R.exp(second)
            y = R.reshape(root, R.shape([8]))
            grad = R.reshape(ct_0, R.shape([2, 4]))
            through = R.multiply(grad, root)
            both = R.add(through, ct_1)
            masked = R.multiply(both, keep)
            doubled = R.multiply(masked, twos)
            slope = R.subtract(twos, scaled)
            grad_x = R.multiply(doubled, slope)
            gv = (y, second, x, grad_x, ct_1)
            R.output(gv)
        return gv


def hand_made() -> JointModule:
    return JointModule(
        mod=Joint,
        primals=("x", "m"),
        cotangents=("ct_0", "ct_1"),
        cotangent_of=(0, 1),
        num_outputs=3,
        wanted=("x", "m"),
    )


def split_of(joint: JointModule) -> SplitModule:
    parts = split(joint, color(joint))
    relax.analysis.well_formed(parts.mod)
    return parts


def random_for(parameters: Sequence[relax.Var]) -> list[torch.Tensor]:
    tensors = []
    for parameter in parameters:
        value = torch.randn(shape_of(parameter) or (), dtype=torch.float64)
        dtype = from_relax_dtype(dtype_of(parameter))
        tensors.append(value > -1 if dtype is torch.bool else value.to(dtype))
    return tensors


def run_parts(joint: JointModule, parts: SplitModule) -> tuple[list[torch.Tensor], ...]:
    """Return the results of the joint function, and of forward and backward run separately."""
    run = CompiledFunctions(tvm.IRModule({**joint.mod.functions, **parts.mod.functions}))
    inputs = random_for(joint.mod["joint"].params)
    primals, cotangents = inputs[: len(joint.primals)], inputs[len(joint.primals) :]
    forward = run("forward", *primals)
    outputs, residuals = forward[: parts.num_outputs], forward[parts.num_outputs :]
    assert [r.shape for r in residuals] == [r.spec.shape for r in parts.residuals]
    reads = [primals[joint.primals.index(name)] for name in parts.reads]
    kept = [outputs[number].view(shape) for number, shape in parts.kept_outputs]
    gradients = run("backward", *reads, *kept, *residuals, *cotangents)
    return run("joint", *inputs), [*outputs, *gradients]


def parameters_of(parts: SplitModule, name: str) -> list[str]:
    return [p.name for p in parts.mod[name].params]


def results_of(parts: SplitModule, name: str) -> list[str]:
    return [getattr(r, "name", "constant") for r in flat_results(parts.mod[name])]


def test_a_residual_that_is_an_output_is_kept_as_the_output() -> None:
    parts = split_of(hand_made())
    assert parts.kept_outputs == ((0, (2, 4)),)
    assert [r.name for r in parts.residuals] == ["scaled"]
    assert results_of(parts, "forward") == ["y", "second", "x", "scaled"]
    assert parameters_of(parts, "backward") == ["m", "root", "scaled", "ct_0", "ct_1"]


def test_constants_are_in_both_functions() -> None:
    mod = split_of(hand_made()).mod
    for name in ("forward", "backward"):
        assert "relax.full" in operators(tvm.IRModule({name: mod[name]}))


def test_inputs_are_passed_and_masks_stay_one_byte() -> None:
    parts = split_of(hand_made())
    assert parts.reads == ("m",)
    assert dtype_of(parts.mod["backward"].params[0]) == "bool"
    assert parameters_of(parts, "forward") == ["x", "m"]
    assert "float64" not in {dtype_of(p) for p in parts.mod["backward"].params[:1]}


def test_the_bytes_that_are_kept_are_counted_without_outputs() -> None:
    parts = split_of(hand_made())
    assert parts.residual_bytes == 2 * 4 * 8
    (residual,) = parts.residuals
    assert residual.spec.dtype is torch.float64


def test_gradients_say_which_cotangents_they_need() -> None:
    parts = split_of(hand_made())
    assert parts.gradient_reads == (frozenset({0, 1}), frozenset({1}))


def test_forward_and_backward_are_the_joint_function() -> None:
    joint = hand_made()
    expected, got = run_parts(joint, split_of(joint))
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


def test_forward_and_backward_of_a_transformer_layer_are_its_joint_function() -> None:
    joint = transformer_joint().joint
    parts = split_of(joint)
    assert (parts.primals, parts.wanted) == (joint.primals, joint.wanted)
    assert [n for n in parts.reads if n.startswith("dropout_mask_")] == [
        "dropout_mask_0",
        "dropout_mask_1",
    ]
    expected, got = run_parts(joint, parts)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_the_functions_share_no_variables() -> None:
    parts = split_of(transformer_joint().joint)
    seen: list[set[relax.Var]] = []
    for name in ("forward", "backward"):
        function = parts.mod[name]
        assert not relax.analysis.free_vars(function)
        bound = {b.var for b in function.body.blocks[0].bindings} | set(function.params)
        seen.append(bound)
    assert not seen[0] & seen[1]


def x_and(*shape: int) -> list[torch.Tensor]:
    return [torch.randn(3, 4).double(), torch.randn(shape).double()]


# By name: a formula; outputs kept for backward, number of residuals, primals that backward reads.
BORDERS = {
    "an-output-of-its-own": (
        lambda x, w: op.exp(op.multiply(x, w)),
        ([(0, (3, 4))], 0, {"x0", "x1"}),
    ),
    "a-sum-keeps-nothing": (lambda x, w: op.add(x, w), ([], 0, set())),
    "an-input-returned": (
        lambda x, w: [op.reshape(x, (12,)), op.multiply(x, w)],
        ([], 0, {"x0", "x1"}),
    ),
    "one-value-twice": (
        lambda x, w: [(e := emit(op.exp(op.add(x, w)))), op.reshape(e, (2, 6)), op.negative(e)],
        ([(0, (3, 4))], 0, set()),
    ),
    "two-outputs": (
        lambda x, w: [op.tanh(op.add(x, w)), op.exp(op.multiply(x, w))],
        ([(0, (3, 4)), (1, (3, 4))], 0, {"x0", "x1"}),
    ),
    "a-view-of-a-residual": (
        lambda x, w: op.multiply(op.reshape(op.tanh(x), (4, 3)), op.reshape(op.exp(w), (4, 1))),
        ([], 2, set()),
    ),
    "pieces": (
        lambda x, w: op.multiply(op.split(op.exp(x), 2, 1)[0], op.split(op.sin(x), 2, 1)[1]),
        ([], 3, {"x0"}),
    ),
    "a-constant-output": (
        lambda x, w: [relax.const(torch.ones(2).numpy()), op.multiply(x, x)],
        ([], 0, {"x0"}),
    ),
}


def emit(expr: relax.Expr) -> relax.Var:
    return relax.BlockBuilder.current().emit(expr)


@pytest.mark.parametrize("name", BORDERS)
def test_what_crosses_the_border(name: str) -> None:
    formula, (kept, residuals, reads) = BORDERS[name]
    mod = build_main(x_and(4) if name != "a-view-of-a-residual" else x_and(4, 1), formula)
    outputs = range(len(flat_results(mod["main"])))
    joint = differentiate(mod, ["x0", "x1"], outputs, [])
    parts = split_of(joint)
    expected, got = run_parts(joint, parts)
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)
    assert list(parts.kept_outputs) == kept
    assert len(parts.residuals) == residuals
    assert set(parts.reads) == reads
