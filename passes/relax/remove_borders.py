"""Remove the operators that mark the boundaries of custom autograd functions.

Before::

    lv = R.call_pure_packed("tvmbridge.aten", '{"op": "tvmbridge.enters.default", ...}', a)
    lv1 = R.multiply(lv, x)
    gv = R.call_pure_packed("tvmbridge.aten", '{"op": "tvmbridge.leaves.default", ...}', lv1, lv)

After::

    lv = a
    lv1 = R.multiply(lv, x)
    gv = lv1

The operators mark where gradients enter and leave the backward of a custom autograd function, for
DropCotangents.

Requires: nothing. Guarantees: there are no boundary operators, and every value is the same. Runs
after: DropCotangents. Runs before: tidying, which removes the bindings that are left.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.kernels.borders import inside, is_border
from tvmbridge.passes.base import PassReport, RelaxPass, map_calls


@dataclass(frozen=True)
class RemoveBorders(RelaxPass):
    """Replace each boundary operator by the operand that it passes through."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def inside_of(call: relax.Call, _: relax.BlockBuilder) -> relax.Expr:
            if not is_border(call):
                return call
            report.rewrote()
            return inside(call)

        return map_calls(mod, inside_of, report)
