"""Kernels without TVM's argument checks: the checks left out, those kept, and their substitutes."""

from __future__ import annotations

import pytest
import torch
import tvm
import tvm_ffi
from tvm import relax, te, tirx

from tests.relax_helpers import CompiledFunctions, build_main
from tvmbridge.compiler.argument_checks import UNCHECKED
from tvmbridge.legalize.aten.bounds import checked
from tvmbridge.schedules.target import host_target


def lowered(function: tirx.PrimFunc, pipeline: str) -> tvm.IRModule:
    mod = tvm.IRModule({"kernel": function.with_attr("global_symbol", "kernel")})
    target = host_target()
    bind = tirx.transform.BindTarget(target.with_host(target))
    with target:
        return tirx.get_tir_pipeline(pipeline)[0](bind(mod))


def assertions(mod: tvm.IRModule) -> list[str]:
    found: list[tirx.AssertStmt] = []
    tvm_ffi.structural_walk(mod["kernel"].body, (tirx.AssertStmt, found.append))
    return ["".join(str(part.value) for part in f.message_parts) for f in found]


def doubled(extent: int | tirx.Var) -> tirx.PrimFunc:
    source = te.placeholder((extent,), "float32", "source")
    return te.create_prim_func([source, te.compute((extent,), lambda i: source[i] * 2.0)])


def test_a_kernel_of_static_shapes_has_none() -> None:
    assert len(assertions(lowered(doubled(4), "default"))) > 10
    assert not assertions(lowered(doubled(4), UNCHECKED))


def test_a_kernel_of_symbolic_shapes_keeps_them() -> None:
    kernel = doubled(tirx.Var("n", "int64"))
    tvm.ir.assert_structural_equal(lowered(kernel, UNCHECKED), lowered(kernel, "default"))


def test_what_a_kernel_asserts_itself_stays() -> None:
    builder = relax.BlockBuilder()
    indices = relax.Var("indices", relax.TensorType((3,), "int64"))
    with builder.function("main", [indices]):
        result = checked(builder, indices, 5, "IndexError", negative=True)
        builder.emit_func_output(result)
    kernel = next(f for _, f in builder.get().functions_items() if isinstance(f, tirx.PrimFunc))
    assert assertions(lowered(kernel, UNCHECKED)) == [
        "index out of bounds for a dimension with size 5"
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        torch.ones(3, 4, dtype=torch.float64),
        torch.ones(4, 4),
        torch.ones(12),
        torch.ones(3, 4, dtype=torch.int32),
    ],
    ids=["dtype", "shape", "dimensions", "kind"],
)
def test_the_virtual_machine_looks_at_the_arguments_of_a_function(wrong: torch.Tensor) -> None:
    right = torch.ones(3, 4)
    compiled = CompiledFunctions(build_main([right], lambda x: relax.op.add(x, x)))
    torch.testing.assert_close(compiled("main", right)[0], right * 2)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        compiled("main", wrong)
