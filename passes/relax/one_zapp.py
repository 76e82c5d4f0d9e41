"""Remove multiplications by one and divisions by one.

Before::

    ones = R.ones((2, 128, 768))
    g = R.multiply(ones, dy)
    h = R.divide(g, R.const(1.0))

After::

    h = dy

Requires: nothing. Guarantees: no multiplication by ones whose other operand has the dtype of the
product; if that operand has another shape, the product becomes a broadcast of it.
Runs after: ZappLike. Runs before: ZeroZapp.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm

from tvmbridge.passes.base import PassReport, RelaxPass, map_functions
from tvmbridge.passes.relax.neutral import NeutralElementMutator


@dataclass(frozen=True)
class OneZapp(RelaxPass):
    """Remove multiplications and divisions by one."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return map_functions(
            mod,
            lambda f: NeutralElementMutator(
                1.0, "relax.multiply", "relax.divide", report
            ).visit_expr(f),
        )
