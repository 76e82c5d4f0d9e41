"""Two calls share a function in the modules for all sample sizes, or in none."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, te

from tvmbridge.symbolic.callees import with_common_callees


def _scaled(rows: int, factor: int) -> tvm.tirx.PrimFunc:
    x = te.placeholder((rows, 2), "float32", "x")
    scaled = te.compute((rows, 2), lambda i, j: x[i, j] * float(factor))
    return te.create_prim_func([x, scaled]).without_attr("global_symbol")


def _module(rows: int, *factors: int) -> tvm.IRModule:
    """Return a module that multiplies by each factor; TVM makes equal kernels one function."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((rows, 2), "float32"))
    with builder.function("main", [x]):
        value: relax.Expr = x
        for factor in factors:
            callee = builder.add_func(_scaled(rows, factor), f"scaled_{factor}")
            value = builder.emit(
                relax.call_tir(callee, (value,), relax.TensorType((rows, 2), "float32"))
            )
        builder.emit_func_output(value)
    return builder.get()


def _callees(mod: tvm.IRModule) -> list[str]:
    bindings = [b for block in mod["main"].body.blocks for b in block.bindings]
    return [b.value.args[0].name_hint for b in bindings]


def test_calls_that_share_a_function_at_one_size_alone_get_two() -> None:
    mods = [_module(3, 2, 5, 2), _module(7, 2, 2, 2)]
    assert len(set(_callees(mods[1]))) == 1
    found = with_common_callees(mods)
    names = _callees(found[0])
    assert _callees(found[1]) == names
    assert names[0] == names[2] != names[1]
    for mod, rows, factor in zip(found, (3, 7), (20, 8), strict=True):
        machine = relax.VirtualMachine(relax.build(mod, "llvm"), tvm.cpu())
        x = tvm.runtime.tensor(np.ones((rows, 2), "float32"))
        assert (machine["main"](x).numpy() == factor).all()


def test_modules_that_call_alike_are_left_alone() -> None:
    mods = [_module(3, 2, 5), _module(7, 2, 5)]
    assert all(a is b for a, b in zip(with_common_callees(mods), mods, strict=True))
