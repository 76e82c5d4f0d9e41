"""Operators become calls of loops.

Before::

    lv = R.add(x, y)
    lv1 = R.add(lv, y)

After::

    lv = R.call_tir(add, (x, y), out_ty=...)
    lv1 = R.call_tir(add, (lv, y), out_ty=...)

Requires: static shapes. Guarantees: TVM's LegalizeOps with the legalisations of
``tvmbridge/legalize/``; calls that are alike are legalised once.
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
    """TVM's LegalizeOps with our legalisations."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return relax.transform.LegalizeOps(legalize_map())(mod)
