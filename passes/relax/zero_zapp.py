"""Additions of zero go away.

Before::

    zeros = R.zeros((768,))
    g = R.add(zeros, dw)

After::

    g = dw

A multiplication by zeros stays: the other operand may hold an infinity or NaN, whose product with
zero is NaN. (-0.0 + 0.0 is 0.0 where this pass leaves -0.0; the two compare equal.)

Requires: nothing. Guarantees: no addition or subtraction of zeros whose other operand has the
shape and dtype of the sum. Runs after: OneZapp.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm

from tvmbridge.passes.base import PassReport, RelaxPass, map_functions
from tvmbridge.passes.relax.neutral import NeutralElementMutator


@dataclass(frozen=True)
class ZeroZapp(RelaxPass):
    """Remove additions and subtractions of zero."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return map_functions(
            mod,
            lambda f: NeutralElementMutator(0.0, "relax.add", "relax.subtract", report).visit_expr(
                f
            ),
        )
