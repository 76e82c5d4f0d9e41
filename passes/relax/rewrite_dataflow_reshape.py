"""Calls of TIR functions that only copy a tensor in its order become reshapes, without a copy.

TVM's pass of this name computes offsets within a buffer in 32 bits, and raises if a buffer has more
than 2**31 elements.

Before::

    y = R.call_tir(cls.reshape, (x,), out_ty=R.Tensor((8, 2)))

After::

    y = R.reshape(x, R.shape([8, 2]))

Requires: functions are not scheduled, because reshapes are recognized by their loops.
Guarantees: a module with a buffer of more than 2**31 - 1 elements stays as it is.
Runs after: FuseTIR. Runs before: schedules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import tvm
from tvm import relax, tirx

from tvmbridge.passes.base import PassReport, RelaxPass

_MOST_ELEMENTS = 2**31 - 1


@dataclass(frozen=True)
class RewriteDataflowReshape(RelaxPass):
    """Run TVM's RewriteDataflowReshape, unless a buffer is too large for it."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        for name, function in mod.functions_items():
            if isinstance(function, tirx.PrimFunc) and _elements(function) > _MOST_ELEMENTS:
                report.decline(name.name_hint, "a buffer has more than 2**31 - 1 elements")
                return mod
        return relax.transform.RewriteDataflowReshape()(mod)


def _elements(function: tirx.PrimFunc) -> int:
    """Return the number of elements of the largest argument whose extents are numbers."""
    # Scalar arguments have no shape.
    shapes = [getattr(param, "shape", ()) for param in function.params]
    return max(
        (
            math.prod(int(extent) for extent in shape)
            for shape in shapes
            if all(isinstance(extent, tirx.IntImm) for extent in shape)
        ),
        default=0,
    )
