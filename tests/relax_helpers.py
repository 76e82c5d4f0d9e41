"""Helpers for tests of Relax modules: compile one, run it on PyTorch tensors, apply a pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import tvm
import tvm_ffi
from tvm import relax

from tvmbridge.backends import resolve_target
from tvmbridge.compiler.build import build
from tvmbridge.kernels.dtypes import to_relax_dtype
from tvmbridge.passes.base import PassReport, RelaxPass


class CompiledFunctions:
    """The compiled functions of a module, called by name on PyTorch's tensors."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self._machine = build(mod, resolve_target(None), []).machine

    def __call__(self, name: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Call the function ``name``, and return copies of its results."""
        dense = [t.detach().clone(memory_format=torch.contiguous_format) for t in tensors]
        result = self._machine[name](*dense)
        if not isinstance(result, Sequence | tvm_ffi.Array):
            result = [result]
        return [torch.from_dlpack(r).clone() for r in result]


def compile_and_run(
    mod: tvm.IRModule, *tensors: torch.Tensor, name: str = "main"
) -> list[torch.Tensor]:
    """Build ``mod`` for this machine and call one of its functions."""
    return CompiledFunctions(mod)(name, *tensors)


def build_main(
    inputs: Sequence[torch.Tensor],
    formula: Callable[..., relax.Expr | Sequence[relax.Expr]],
) -> tvm.IRModule:
    """Build a module with ``main(x0, x1, ...)``, which returns a tuple of ``formula``'s results.

    The parameters have the shapes and dtypes of ``inputs``.
    """
    parameters = [
        relax.Var(f"x{i}", relax.TensorType(tuple(t.shape), to_relax_dtype(t.dtype)))
        for i, t in enumerate(inputs)
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", parameters):
        with builder.dataflow():
            results = formula(*parameters)
            listed = [results] if isinstance(results, relax.Expr) else list(results)
            bound = [builder.emit(r) for r in listed]
            output = builder.emit_output(relax.Tuple(bound))
        builder.emit_func_output(output)
    return builder.get()


def apply_pass(pass_: RelaxPass, mod: tvm.IRModule) -> tuple[tvm.IRModule, PassReport]:
    """Apply a pass; return the rewritten module and the pass's report."""
    report = PassReport()
    return pass_.apply(mod, report), report


def assert_changes_nothing(pass_: RelaxPass, mod: tvm.IRModule) -> PassReport:
    """Assert that the pass returns an unchanged module; return the pass's report."""
    after, report = apply_pass(pass_, mod)
    tvm.ir.assert_structural_equal(after, mod)
    assert report.rewrites == 0
    return report


def assert_becomes(
    pass_: RelaxPass,
    before: tvm.IRModule,
    expected: tvm.IRModule,
    rewrites: int,
    declined: Sequence[str] = (),
) -> None:
    """Assert that the pass makes ``expected`` of ``before``, and changes nothing of the result.

    ``rewrites`` and ``declined`` are those of the first application's report.
    """
    after, report = apply_pass(pass_, before)
    tvm.ir.assert_structural_equal(after, expected)
    assert (report.rewrites, report.declined) == (rewrites, list(declined))
    assert_changes_nothing(pass_, after)


def operators(mod: tvm.IRModule) -> list[str]:
    """Return the names of the operators of all calls in ``mod``, in order."""
    found = []
    for _, function in mod.functions_items():
        if not isinstance(function, relax.Function):
            continue
        for block in function.body.blocks:
            for binding in block.bindings:
                if isinstance(binding.value, relax.Call):
                    found.append(getattr(binding.value.op, "name", str(binding.value.op)))
    return found


def fingerprint(mod: tvm.IRModule) -> tuple[int, Any, Any]:
    """Return a value that changes if a function of ``mod`` is replaced or changed inside."""
    content = tvm_ffi.structural_hash(mod, map_free_vars=True)
    return content, tuple(mod.functions_items()), mod.attrs
