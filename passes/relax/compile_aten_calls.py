"""Calls of ATen kernels become loops of compiled code, for operators that tvmbridge has loops for.

Before::

    lv = R.call_pure_packed("tvmbridge.aten", '{"op": "aten.log1p.default", "compiled": true}', x)

After::

    lv = R.call_tir(log1p, (x,), out_ty=...)

A call is marked by ``"compiled": true`` in its spec, the JSON that describes the operator.

Requires: the operator of each marked call is in ``tvmbridge.legalize.aten.COMPILED``.
Guarantees: no marked call of the chosen operators is left; others are untouched.
Runs after: the split into forward and backward, which reads the operators of ATen calls. Runs
before: FuseOps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.kernels.aten_call import compiled_call
from tvmbridge.legalize.aten import compile_aten_call
from tvmbridge.passes.base import PassReport, RelaxPass


@dataclass(frozen=True)
class CompileAtenCalls(RelaxPass):
    """Replace marked ATen calls by loops.

    Args:
        operators: names of the operators whose calls are replaced, beside marked poolings with
            channels last; None: all operators.
    """

    operators: frozenset[str] | None = None

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        rewriter = _AtenCallMutator(mod, report, self.operators)
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function):
                rewriter.builder_.update_func(name, rewriter.visit_expr(function))
        return rewriter.builder_.get() if report.rewrites else mod


@mutator
class _AtenCallMutator(PyExprMutator):
    def __init__(
        self, mod: tvm.IRModule, report: PassReport, operators: frozenset[str] | None
    ) -> None:
        super().__init__(mod)
        self.report = report
        self.operators = operators

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.builder_.normalize(super().visit_call_(call))
        content = compiled_call(call)
        if content is None or not self._chosen(content):
            return call
        self.report.rewrote()
        return compile_aten_call(self.builder_, call, content)

    def _chosen(self, content: Mapping[str, Any]) -> bool:
        if self.operators is None or content.get("channels_last"):
            return True
        return content["op"] in self.operators
