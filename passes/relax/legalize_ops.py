"""Relax operators become calls of TIR functions, which compute them in loops.

Before::

    lv = R.add(x, y)
    lv1 = R.add(lv, y)

After::

    lv = R.call_tir(add, (x, y), out_ty=...)
    lv1 = R.call_tir(add, (lv, y), out_ty=...)

Requires: static shapes. Guarantees: the result of TVM's LegalizeOps with the legalizations of
``tvmbridge/legalize/``; equal calls share one function.
Runs after: DispatchKernels, CompileAtenCalls. Runs before: AnnotateTIROpPattern.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.legalize.repeats import legalize_map
from tvmbridge.passes.base import PassReport, RelaxPass


@dataclass(frozen=True)
class LegalizeOps(RelaxPass):
    """Run TVM's LegalizeOps with the legalizations of tvmbridge."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return relax.transform.LegalizeOps(legalize_map())(mod)
