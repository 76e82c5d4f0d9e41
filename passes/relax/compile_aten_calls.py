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

from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.kernels.aten_call import compiled_call
from tvmbridge.legalize.aten import compile_aten_call
from tvmbridge.passes.base import PassReport, RelaxPass, map_calls


@dataclass(frozen=True)
class CompileAtenCalls(RelaxPass):
    """Replace marked ATen calls by loops.

    Args:
        operators: names of the operators whose calls are replaced, beside marked poolings with
            channels last; None: all operators.
    """

    operators: frozenset[str] | None = None

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def rewrite(call: relax.Call, builder: relax.BlockBuilder) -> relax.Expr:
            call = builder.normalize(call)
            content = compiled_call(call)
            if content is None:
                return call
            chosen = self.operators is None or content["op"] in self.operators
            if not chosen and not content.get("channels_last"):
                return call
            report.rewrote()
            return compile_aten_call(builder, call, content)

        return map_calls(mod, rewrite, report)
