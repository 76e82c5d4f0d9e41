"""A split into n pieces becomes splits of splits: TVM's Gradient would emit n * n values for it.

Before::

    a: R.Tuple(...) = R.split(x, 100, axis=1)
    a0 = a[0]

After::

    lv = R.split(x, [10, 20, ..., 90], axis=1)
    lv1 = lv[0]
    lv2 = R.split(lv1, [1, 2, ..., 9], axis=1)
    lv3 = lv2[0]
    ...
    a: R.Tuple(...) = (lv3, ...)
    a0 = a[0]

The adjoint of a tuple is a tuple, which Gradient emits anew for each field that is read: n * n
fields for n pieces. With groups of about sqrt(n) pieces the number is about n * sqrt(n).

Requires: static shapes. Guarantees: splits into at most ``most`` pieces are untouched.
Runs before: CanonicalizeBindings, which replaces fields of the tuple by its members; Gradient.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.passes.base import PassReport, RelaxPass, map_calls

_MOST = 16


@dataclass(frozen=True)
class NestSplits(RelaxPass):
    """Replace splits into more than 16 tensors by splits in two steps."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return map_calls(mod, lambda call, builder: self._nested(call, builder, report), report)

    def _nested(
        self, call: relax.Call, builder: relax.BlockBuilder, report: PassReport
    ) -> relax.Expr:
        if getattr(call.op, "name", "") != "relax.split" or len(call.ty.fields) <= _MOST:
            return call
        report.rewrote()
        axis = int(call.attrs.axis)
        extents = [int(field.shape.values[axis]) for field in call.ty.fields]
        group = math.isqrt(len(extents))
        groups = [extents[i : i + group] for i in range(0, len(extents), group)]
        pieces = []
        parts = _split(call.args[0], [sum(g) for g in groups], axis, builder)
        for part, inner in zip(parts, groups, strict=True):
            pieces += _split(part, inner, axis, builder)
        return relax.Tuple(pieces)


def _split(
    x: relax.Expr, extents: list[int], axis: int, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    if len(extents) == 1:
        return [x]
    cuts = list(itertools.accumulate(extents[:-1]))
    pieces = builder.emit(relax.op.split(x, cuts, axis))
    return [builder.emit(relax.TupleGetItem(pieces, i)) for i in range(len(extents))]
