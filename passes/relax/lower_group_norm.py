"""Group norm becomes elementary operators, which normalize each group of channels as one row.

Before::

    # x: (2, 8, 5, 5)
    y = R.nn.group_norm(x, gamma, beta, num_groups=4, channel_axis=1, axes=[2, 3])

After::

    rows = R.reshape(x, (8, 50))
    mean = R.mean(rows, [1], keepdims=True)
    centered = rows - mean
    variance = R.mean(centered * centered, [1], keepdims=True)
    normed = R.reshape(centered * R.rsqrt(variance + 1e-5), (2, 8, 5, 5))
    y = normed * R.reshape(gamma, (8, 1, 1)) + R.reshape(beta, (8, 1, 1))

Half precisions are computed in float32. (TVM's own legalization computes the variance as
E[x^2] - E[x]^2, which loses all digits if the mean is large.)

Requires: static shapes, the channels in dimension 1, and ``axes`` with all dimensions after it
(others are declined). Guarantees: no other ``relax.nn.group_norm`` is left.
Runs before: AppendCotangents. Runs after: the frontend.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.passes.base import PassReport, RelaxPass, shape_of
from tvmbridge.passes.relax.normalizations import Formulas, lower_calls


@dataclass(frozen=True)
class LowerGroupNorm(RelaxPass):
    """Replace every ``relax.nn.group_norm`` by its definition."""

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        return lower_calls(mod, "relax.nn.group_norm", _definition, report)


def _definition(call: relax.Call, formulas: Formulas, report: PassReport) -> relax.Expr | None:
    x, attrs = call.args[0], call.attrs
    shape = shape_of(x) or ()
    rank = len(shape)
    axes = sorted(int(a) % rank for a in attrs.axes)
    if int(attrs.channel_axis) % rank != 1 or axes != list(range(2, rank)):
        report.decline("relax.nn.group_norm", "the channels are not in dimension 1")
        return None
    count = shape[0] * int(attrs.num_groups)
    rows = formulas.emit(relax.op.reshape(x, [count, math.prod(shape) // count]))
    normed = formulas.standardized(formulas.wide(rows), [1], float(attrs.epsilon))
    spread = formulas.emit(relax.op.reshape(normed, list(shape)))
    return formulas.result(call, spread, 1)
