"""Instance norm becomes elementary operators, which normalize each channel of each sample.

Before::

    y = R.nn.instance_norm(x, gamma, beta, channel_axis=1, axes=[2, 3])     # x: (2, 8, 5, 5)

After::

    mean = R.mean(x, [2, 3], keepdims=True)
    centered = x - mean
    variance = R.mean(centered * centered, [2, 3], keepdims=True)
    normed = centered * R.rsqrt(variance + 1e-5)
    y = normed * R.reshape(gamma, (8, 1, 1)) + R.reshape(beta, (8, 1, 1))

Half precisions are computed in float32.

Requires: static shapes. Guarantees: no other ``relax.nn.instance_norm`` is left.
Runs before: AppendCotangents. Runs after: the frontend.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.passes.base import PassReport, RelaxPass, shape_of
from tvmbridge.passes.relax.normalizations import Formulas, lower_calls


@dataclass(frozen=True)
class LowerInstanceNorm(RelaxPass):
    """Replace every ``relax.nn.instance_norm`` by its definition."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return lower_calls(mod, "relax.nn.instance_norm", _definition, report)


def _definition(call: relax.Call, formulas: Formulas, report: PassReport) -> relax.Expr:
    x, attrs = call.args[0], call.attrs
    rank = len(shape_of(x) or ())
    channel = int(attrs.channel_axis) % rank
    axes = [int(a) % rank for a in attrs.axes]
    normed = formulas.standardized(formulas.wide(x), axes, float(attrs.epsilon))
    return formulas.result(call, normed, channel)
