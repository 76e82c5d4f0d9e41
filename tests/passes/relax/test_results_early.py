"""ResultsEarly: a result is computed right after its last operand, unless it is much larger."""

# ruff: noqa: ANN201  (the Relax functions here are TVM script)

from __future__ import annotations

import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.relax_helpers import assert_becomes, assert_changes_nothing
from tvmbridge.compiler.step_memory import peak_bytes
from tvmbridge.passes.relax.results_early import ResultsEarly


@I.ir_module
class Before:
    @R.function
    def backward(
        x: R.Tensor((64, 4), "float16"),
        w: R.Tensor((4, 4), "float16"),
        ct: R.Tensor((64, 4), "float16"),
    ):
        with R.dataflow():
            second = R.multiply(ct, ct)
            first = R.matmul(second, w)
            through = R.matmul(first, w)
            last = R.matmul(through, w)
            wide = R.broadcast_to(second, (100, 64, 4))
            doubled = R.add(x, x)
            moved = R.permute_dims(doubled)
            slope = R.matmul(moved, second)
            cast = R.astype(slope, "float32")
            halves = R.split(first, 2, axis=0)
            half = halves[0]
            from_arguments = R.exp(x)
            gv = (last, wide, cast, half, from_arguments)
            R.output(gv)
        return gv


@I.ir_module
class Expected:
    @R.function
    def backward(
        x: R.Tensor((64, 4), "float16"),
        w: R.Tensor((4, 4), "float16"),
        ct: R.Tensor((64, 4), "float16"),
    ):
        with R.dataflow():
            second = R.multiply(ct, ct)
            doubled = R.add(x, x)
            moved = R.permute_dims(doubled)
            slope = R.matmul(moved, second)
            cast = R.astype(slope, "float32")
            first = R.matmul(second, w)
            through = R.matmul(first, w)
            last = R.matmul(through, w)
            halves = R.split(first, 2, axis=0)
            half = halves[0]
            wide = R.broadcast_to(second, (100, 64, 4))
            from_arguments = R.exp(x)
            gv = (last, wide, cast, half, from_arguments)
            R.output(gv)
        return gv


def test_results_follow_their_operands() -> None:
    assert_becomes(ResultsEarly(), Before, Expected, 1)


def _peaks(layers: int) -> list[float]:
    """Return the peak of a backward whose gradients of weights come last, before and after."""
    builder = relax.BlockBuilder()
    shape = relax.TensorType((64, 64), "float32")
    inputs = [relax.Var(f"x{i}", shape) for i in range(layers)]
    cotangent = relax.Var("ct", shape)
    with builder.function("backward", [*inputs, cotangent]):
        with builder.dataflow():
            flowing = [builder.emit(relax.op.exp(cotangent))]
            for x in inputs:
                flowing.append(builder.emit(relax.op.multiply(flowing[-1], x)))
            sums = [builder.emit(relax.op.sum(value, [0])) for value in flowing]
            output = builder.emit_output(relax.Tuple(sums))
        builder.emit_func_output(output)
    before = builder.get()
    return [peak_bytes(mod["backward"]) for mod in (before, ResultsEarly()(before))]


def test_cotangents_of_all_layers_are_not_in_memory_at_once() -> None:
    before, after = _peaks(20)
    assert before > 20 * 64 * 64 * 4
    assert after < 3 * 64 * 64 * 4


def test_forward_keeps_its_order() -> None:
    mod = tvm.IRModule({"forward": Before["backward"].with_attr("global_symbol", "forward")})
    assert_changes_nothing(ResultsEarly(), mod)
