"""LaunchAsGraph: kernels between those of the arguments and of the results are one CUDA graph."""

from __future__ import annotations

import tvm
from tvm import relax

from tests.relax_helpers import assert_changes_nothing, operators
from tvmbridge.passes.base import PassReport
from tvmbridge.passes.relax.launch_as_graph import LaunchAsGraph


def _planned(steps: int) -> tvm.IRModule:
    """Return a function that adds a weight so many times, with planned memory."""
    builder = relax.BlockBuilder()
    x, w = (relax.Var(name, relax.TensorType((4,), "float32")) for name in ("x", "w"))
    with builder.function("forward", [x, w], {"num_input": 1}):
        with builder.dataflow():
            value = x
            for _ in range(steps):
                value = builder.emit_te(tvm.topi.add, value, w)
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    passes = [
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
        relax.transform.StaticPlanBlockMemory(),
    ]
    return tvm.transform.Sequential(passes)(builder.get())


def test_the_kernels_in_the_middle_are_a_graph() -> None:
    report = PassReport()
    found = LaunchAsGraph().apply(_planned(5), report)
    names = [name.name_hint for name, f in found.functions_items() if isinstance(f, relax.Function)]
    assert "forward_cuda_graph_capture" in names
    assert report.rewrites == 1
    assert "relax.call_builtin_with_ctx" in operators(found)


def test_one_kernel_is_no_graph() -> None:
    assert_changes_nothing(LaunchAsGraph(), _planned(1))
