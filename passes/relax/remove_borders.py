"""Borders of custom autograd functions go away: they have told what they are there for.

Before::

    lv = R.call_pure_packed("tvmbridge.aten", '{"op": "tvmbridge.enters.default", ...}', a)
    lv1 = R.multiply(lv, x)
    gv = R.call_pure_packed("tvmbridge.aten", '{"op": "tvmbridge.leaves.default", ...}', lv1, lv)

After::

    lv = a
    lv1 = R.multiply(lv, x)
    gv = lv1

Requires: nothing. Guarantees: there are no borders, and every value is as before. Runs after:
whatever changes which cotangents arrive. Runs before: tidying, which removes the bindings that are
left.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.kernels.borders import inside, is_border
from tvmbridge.passes.base import PassReport, RelaxPass, map_functions


@dataclass(frozen=True)
class RemoveBorders(RelaxPass):
    """Replace each border by what it hands on."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        removed = map_functions(mod, lambda f: _BorderMutator(report).visit_expr(f))
        return removed if report.rewrites else mod


@mutator
class _BorderMutator(PyExprMutator):
    def __init__(self, report: PassReport) -> None:
        super().__init__()
        self.report = report

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if not is_border(call):
            return call
        self.report.rewrote()
        return inside(call)
