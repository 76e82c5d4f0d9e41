"""What passes share: functions by name, calls with added functions, readers, rebuilt functions."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvmbridge.passes.base import (
    PassReport,
    binding,
    bindings_of,
    is_call,
    map_calls,
    map_functions,
    readers_of,
    with_bindings,
)


@I.ir_module
class Two:
    @R.function
    def forward(x: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
        with R.dataflow():
            y = R.exp(x)
            z = R.add(y, y)
            R.output(z)
        return z

    @R.function
    def backward(x: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
        with R.dataflow():
            y = R.exp(x)
            R.output(y)
        return y


def _names(function: relax.Function) -> list[str]:
    return [value.op.name for value in bindings_of(function).values()]


def test_one_function_is_rewritten_by_name() -> None:
    def doubled(function: relax.Function) -> relax.Function:
        (old,) = bindings_of(function)
        twice = relax.Var("twice", old.ty)
        inner = relax.DataflowVar("inner", old.ty)
        bindings = [
            binding(inner, bindings_of(function)[old]),
            binding(twice, relax.op.add(inner, inner)),
        ]
        return with_bindings(function, bindings, twice)

    changed = map_functions(Two, doubled, "backward")
    assert _names(changed["backward"]) == ["relax.exp", "relax.add"]
    assert changed["forward"].same_as(Two["forward"])
    assert _names(Two["backward"]) == ["relax.exp"]
    relax.analysis.well_formed(changed)  # raises
    assert map_functions(Two, doubled, "other") is Two


def test_calls_may_become_calls_of_new_functions() -> None:
    @T.prim_func(private=True)
    def kernel(x: T.Buffer((2,), "float32"), y: T.Buffer((2,), "float32")) -> None:
        for i in range(2):
            y[i] = x[i]

    report = PassReport()

    def rewrite(call: relax.Call, builder: relax.BlockBuilder) -> relax.Expr:
        if not is_call(call, "relax.exp"):
            return call
        report.rewrote()
        callee = builder.add_func(kernel, "kernel")
        return relax.call_tir(callee, [call.args[0]], call.ty)

    changed = map_calls(Two, rewrite, report)
    assert report.rewrites == 2
    assert _names(changed["forward"]) == ["relax.call_tir", "relax.add"]
    added = [f for f in changed.functions.values() if isinstance(f, tvm.tirx.PrimFunc)]
    assert len(added) == 1
    relax.analysis.well_formed(changed)  # raises
    assert map_calls(Two, lambda call, _: call, PassReport()) is Two


def test_readers_are_variables_and_none_for_the_result() -> None:
    forward = Two["forward"]
    (x,), (y, z) = forward.params, bindings_of(forward)
    readers = readers_of(forward)
    assert readers[x] == [y]
    assert readers[y] == [z]
    assert readers[z] == [None]
