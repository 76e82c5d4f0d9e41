"""A cast to a narrower dtype goes before the permutation whose result it casts.

Before::

    lv = R.permute_dims(w, axes=[1, 0])
    lv1 = R.astype(lv, "bfloat16")
    lv2 = R.matmul(x, lv1)

After::

    lv = R.astype(w, "bfloat16")
    lv1 = R.permute_dims(lv, axes=[1, 0])
    lv2 = R.matmul(x, lv1)

A product by PyTorch reads the permutation as a view, which the cast would write to memory. Under
autocast forward multiplies by the transpose of a weight and backward by the weight itself: after
the pass one cast serves both.

Guarantees: the values are the same, bit by bit. Runs before: equal expressions are merged, and the
joint function is split.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax import op

from tvmbridge.passes.base import PassReport, RelaxPass, dtype_of, map_calls

_BITS = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}


@dataclass(frozen=True)
class CastFirst(RelaxPass):
    """Cast what is permuted rather than the permutation."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def rewritten(call: relax.Call, builder: relax.BlockBuilder) -> relax.Expr:
            if not _narrows(call):
                return call
            permutation = _bound(call.args[0], builder)
            if not isinstance(permutation, relax.Call):
                return call
            if getattr(permutation.op, "name", "") != "relax.permute_dims":
                return call
            report.rewrote()
            cast = builder.emit(op.astype(permutation.args[0], dtype_of(call)))
            return op.permute_dims(cast, permutation.attrs.axes)

        return map_calls(mod, rewritten)


def _bound(expr: relax.Expr, builder: relax.BlockBuilder) -> relax.Expr | None:
    return builder.lookup_binding(expr) if isinstance(expr, relax.Var) else None


def _narrows(call: relax.Call) -> bool:
    if getattr(call.op, "name", "") != "relax.astype":
        return False
    return _BITS.get(dtype_of(call), 64) < _BITS.get(dtype_of(call.args[0]), 0)
