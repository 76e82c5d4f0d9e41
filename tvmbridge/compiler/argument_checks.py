"""A TVM pipeline that compiles kernels without checks of their arguments.

TVM adds to each kernel checks of the number, type, shape, strides and device of its arguments, each
with a message. That is more code than a small kernel itself: it takes most of LLVM's time, and a
part of each call's. The checks are redundant in tvmbridge. A kernel's arguments come from the Relax
function that calls it: arguments that the VirtualMachine has checked, memory that it has allocated,
and results of PyTorch's kernels, which ``kernels/results.py`` checks at each call.

A kernel that reads symbols from the shapes of its arguments keeps its checks. Kernels of symbolic
code get the symbols as arguments.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir.pipeline import default_s_tir_pipeline

from tvmbridge.schedules.loops import sequence

# The name of the pipeline, for ``tvm.tirx.build`` and ``relax.build``.
UNCHECKED = "tvmbridge.unchecked"

# The attribute that TVM puts around a kernel's own body.
_OWN_BODY = "compute_scope"


def _unchecked_pipeline() -> tuple[tvm.transform.Pass, Any, Any]:
    lower, finalize_host, finalize_device = default_s_tir_pipeline()

    @tvm.transform.module_pass(opt_level=0, name="LowerUnchecked")
    def run(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        static = {name.name_hint for name, f in mod.functions_items() if _is_known(f)}
        return _without_checks(lower(mod), static)

    return run, finalize_host, finalize_device


def _is_known(function: tirx.PrimFunc) -> bool:
    """Whether each symbol in the parameters' shapes is itself a parameter of the function."""
    given = {p for p in function.params if not tirx.is_buffer_var(p)}
    found: set[Any] = set()
    for param in function.params:
        if param not in given:
            for extent in param.shape:
                tvm_ffi.structural_walk(extent, (tirx.Var, found.add))
    return found <= given


def _without_checks(mod: tvm.IRModule, names: set[str]) -> tvm.IRModule:
    functions = dict(mod.functions_items())
    for name, function in functions.items():
        if name.name_hint in names:
            functions[name] = function.with_body(_without_preamble(function.body))
    return tvm.IRModule(functions, attrs=mod.attrs)


def _without_preamble(body: tirx.Stmt) -> tirx.Stmt:
    """Return ``body`` without the assertions and branches that TVM puts before the kernel's own."""
    scopes: list[tuple[list[tirx.Stmt], tirx.AttrStmt]] = []
    while True:
        kept = [s for s in _listed(body) if not isinstance(s, tirx.AssertStmt | tirx.IfThenElse)]
        last = kept[-1]
        if not isinstance(last, tirx.AttrStmt) or last.attr_key == _OWN_BODY:
            break
        scopes.append((kept[:-1], last))
        body = last.body
    inner = sequence(kept)
    for before, scope in reversed(scopes):
        inner = sequence(
            [*before, tirx.AttrStmt(scope.node, scope.attr_key, scope.value, inner, scope.span)]
        )
    return inner


def _listed(body: tirx.Stmt) -> list[tirx.Stmt]:
    return list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]


tirx.register_tir_pipeline(UNCHECKED, _unchecked_pipeline)
