"""Layer norm becomes elementary operators, which TVM can differentiate.

Before::

    y = R.nn.layer_norm(x, gamma, beta, axes=[-1], epsilon=1e-5)

After::

    mean = R.mean(x, [-1], keepdims=True)
    centered = x - mean
    variance = R.mean(centered * centered, [-1], keepdims=True)
    y = centered * R.rsqrt(variance + 1e-5) * gamma + beta

Half precisions are computed in float32.

Requires: static shapes, and the last axes (others are declined). Guarantees: no other
``relax.nn.layer_norm`` is left.
Runs before: AppendCotangents. Runs after: the frontend. Training only: in inference the whole
operator has a better schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.passes.base import PassReport, RelaxPass
from tvmbridge.passes.relax.normalizations import Formulas, lower_calls


@dataclass(frozen=True)
class LowerLayerNorm(RelaxPass):
    """Replace every ``relax.nn.layer_norm`` by its definition."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return lower_calls(mod, "relax.nn.layer_norm", _definition, report)


def _definition(call: relax.Call, formulas: Formulas, report: PassReport) -> relax.Expr | None:
    x, rank = call.args[0], call.args[0].ty.ndim
    axes = [int(a) % max(rank, 1) for a in call.attrs.axes]
    if axes != list(range(rank - len(axes), rank)):
        report.decline("relax.nn.layer_norm", "the axes are not the last ones, in order")
        return None
    normed = formulas.standardized(formulas.wide(x), axes, float(call.attrs.epsilon))
    return formulas.result(call, normed)
