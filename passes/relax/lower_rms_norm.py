"""RMS norm becomes elementary operators, which TVM can differentiate.

Before::

    y = R.nn.rms_norm(x, weight, axes=[-1], epsilon=1e-5)

After::

    square = R.mean(x * x, [-1], keepdims=True)
    y = x * R.rsqrt(square + 1e-5) * weight

Half precisions are computed in float32.

Requires: static shapes, and the last axes (others are declined). Guarantees: no other
``relax.nn.rms_norm`` is left.
Runs before: AppendCotangents. Runs after: the frontend. Training only: in inference the whole
operator has a better schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.passes.base import PassReport, RelaxPass, dtype_of
from tvmbridge.passes.relax.normalizations import Formulas, lower_calls


@dataclass(frozen=True)
class LowerRMSNorm(RelaxPass):
    """Replace every ``relax.nn.rms_norm`` by its definition."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return lower_calls(mod, "relax.nn.rms_norm", _definition, report)


def _definition(call: relax.Call, formulas: Formulas, report: PassReport) -> relax.Expr | None:
    x, weight = call.args
    rank = x.ty.ndim
    axes = [int(a) % max(rank, 1) for a in call.attrs.axes]
    if axes != list(range(rank - len(axes), rank)):
        report.decline("relax.nn.rms_norm", "the axes are not the last ones, in order")
        return None
    wide = formulas.wide(x)
    scale = formulas.inverse_root(formulas.mean_square(wide, axes), float(call.attrs.epsilon))
    normed = formulas.emit(relax.op.multiply(wide, scale))
    return formulas.cast(formulas.affine(normed, weight, None), dtype_of(x))
