"""Kernels are handed the keys of their specs, which no interrupt can free.

Before::

    lv = R.call_pure_packed("tvmbridge.aten", '{"op": "aten.log1p.default", ...}', x)
    gv = R.call_dps_packed("tvmbridge.matmul", ('{"views": [null, null], ...}', lv, w), out_ty=...)

After::

    lv = R.call_pure_packed("tvmbridge.aten", "0", x)
    gv = R.call_dps_packed("tvmbridge.matmul", ("1", lv, w), out_ty=...)

Requires: the called functions are those of ``tvmbridge.kernels``, which look their keys up.
Guarantees: no call of theirs has a string of more than seven bytes, see ``kernels/keys.py``.
Runs after: whatever reads specs. Runs before: the lowering to the virtual machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmbridge.kernels import KERNELS
from tvmbridge.kernels.keys import key_of
from tvmbridge.passes.base import PassReport, RelaxPass, map_functions

_CALLS = ("relax.call_pure_packed", "relax.call_dps_packed")


@dataclass(frozen=True)
class NameSpecs(RelaxPass):
    """Replace the specs of kernels by their keys."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        named = map_functions(mod, lambda f: _SpecMutator(report).visit_expr(f))
        return named if report.rewrites else mod


@mutator
class _SpecMutator(PyExprMutator):
    def __init__(self, report: PassReport) -> None:
        super().__init__()
        self.report = report

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if getattr(call.op, "name", "") not in _CALLS:
            return call
        callee, *args = call.args
        if not isinstance(callee, relax.ExternFunc) or callee.global_symbol not in KERNELS:
            return call
        inner = args[0].fields if isinstance(args[0], relax.Tuple) else args
        named = [self._named(a) for a in inner]
        if isinstance(args[0], relax.Tuple):
            named = [relax.Tuple(named), *args[1:]]
        return relax.Call(call.op, [callee, *named], call.attrs, call.ty_args)

    def _named(self, arg: relax.Expr) -> relax.Expr:
        if not isinstance(arg, tvm.ir.StringImm) or key_of(arg.value) == arg.value:
            return arg
        self.report.rewrote()
        return tvm.ir.StringImm(key_of(arg.value))
