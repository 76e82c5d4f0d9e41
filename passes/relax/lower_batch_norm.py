"""Batch norm becomes elementary operators, which also compute the new moving statistics.

Before::

    lv = R.nn.batch_norm(x, gamma, beta, moving_mean, moving_var, axis=1, momentum=0.1)
    y, new_mean, new_var = lv[0], lv[1], lv[2]              # x: (2, 8, 5, 5)

After::

    mean = R.mean(x, [0, 2, 3], keepdims=True)
    centered = x - no_grad(mean)
    variance = R.mean(centered * centered, [0, 2, 3], keepdims=True)
    scale = R.rsqrt(variance + 1e-5) * R.reshape(gamma, (8, 1, 1))
    zero = mean - no_grad(mean)
    y = centered * scale + (R.reshape(beta, (8, 1, 1)) - zero * no_grad(scale))
    new_mean = moving_mean * 0.9 + R.reshape(mean, (8,)) * 0.1
    new_var = moving_var * 0.9 + R.reshape(variance, (8,)) * 0.1

No gradient flows into the mean that is subtracted in ``centered``. Through the variance its
gradient is zero anyway; through ``y`` the gradient flows by ``zero``, whose value is 0. So backward
needs two sums over the batch, of the cotangent and of its product with ``centered``, and then one
pass over the elements.

A momentum of 1 makes the statistics of the batch the new statistics. In eval mode the moving
statistics replace those of the batch. With ``fold`` they and the parameters become one factor and
one summand a channel: one operation less for each element, but fewer correct digits in the gradient
of gamma. Half precisions are computed in float32.

Requires: static shapes. Guarantees: no other ``relax.nn.batch_norm`` is left.
Runs before: AppendCotangents. Runs after: the frontend.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.passes.base import PassReport, RelaxPass, dtype_of, shape_of
from tvmbridge.passes.relax.normalizations import (
    Formulas,
    affine_parameters,
    channel_shape,
    lower_calls,
)

op = relax.op


@dataclass(frozen=True)
class LowerBatchNorm(RelaxPass):
    """Replace every ``relax.nn.batch_norm`` by its definition.

    Args:
        fold: whether batch norms in eval mode become ``x * factor + summand``.
    """

    fold: bool = False

    def apply(self, mod: tvm.IRModule, report: PassReport) -> tvm.IRModule:
        def definition(
            call: relax.Call, formulas: Formulas, report: PassReport
        ) -> relax.Expr | None:
            if call.attrs.training:
                return _with_batch_statistics(call, formulas)
            return _with_moving_statistics(call, formulas, self.fold)

        return lower_calls(mod, "relax.nn.batch_norm", definition, report)


def _with_batch_statistics(call: relax.Call, formulas: Formulas) -> relax.Expr:
    x, attrs = call.args[0], call.attrs
    shape = shape_of(x) or ()
    channel = int(attrs.axis) % len(shape)
    wide = formulas.wide(x)
    axes = [i for i in range(len(shape)) if i != channel]
    mean = formulas.emit(op.mean(wide, axes, keepdims=True))
    still = formulas.emit(op.grad.no_grad(mean))
    centered = formulas.emit(op.subtract(wide, still))
    variance = formulas.mean_square(centered, axes)
    gamma, beta = affine_parameters(call)
    row = channel_shape(len(shape), shape[channel], channel)
    scale = formulas.inverse_root(variance, float(attrs.epsilon))
    scale = formulas.affine(scale, gamma, None, row)
    zero = formulas.emit(op.subtract(mean, still))
    fixed = formulas.emit(op.grad.no_grad(scale))
    summand = formulas.emit(op.negative(formulas.emit(op.multiply(zero, fixed))))
    summand = formulas.affine(summand, None, beta, row)
    y = formulas.emit(op.add(formulas.emit(op.multiply(centered, scale)), summand))
    y = formulas.cast(y, dtype_of(x))
    batch = [formulas.emit(op.reshape(value, [shape[channel]])) for value in (mean, variance)]
    momentum = float(attrs.momentum)
    if momentum != 1.0:
        moving = [formulas.wide(value) for value in call.args[3:5]]
        batch = [
            _moved(formulas, old, new, momentum) for old, new in zip(moving, batch, strict=True)
        ]
    statistics = [
        formulas.cast(new, dtype_of(old)) for new, old in zip(batch, call.args[3:5], strict=True)
    ]
    return relax.Tuple([y, *statistics])


def _moved(formulas: Formulas, old: relax.Expr, new: relax.Expr, momentum: float) -> relax.Expr:
    """Return ``(1 - momentum) * old + momentum * new``."""
    dtype = dtype_of(old)
    kept = formulas.emit(op.multiply(old, relax.const(1.0 - momentum, dtype)))
    taken = formulas.emit(op.multiply(formulas.cast(new, dtype), relax.const(momentum, dtype)))
    return formulas.emit(op.add(kept, taken))


def _with_moving_statistics(call: relax.Call, formulas: Formulas, fold: bool) -> relax.Expr:
    x, attrs = call.args[0], call.attrs
    shape = shape_of(x) or ()
    channel = int(attrs.axis) % len(shape)
    row = channel_shape(len(shape), shape[channel], channel)[channel:]
    wide = formulas.wide(x)
    mean, variance = (formulas.cast(value, dtype_of(wide)) for value in call.args[3:5])
    gamma, beta = affine_parameters(call)
    scale = formulas.inverse_root(variance, float(attrs.epsilon))
    if fold:
        scale = formulas.affine(scale, gamma, None)
        moved = formulas.emit(op.multiply(mean, scale))
        beta = (
            formulas.emit(op.negative(moved))
            if beta is None
            else formulas.emit(op.subtract(formulas.cast(beta, dtype_of(wide)), moved))
        )
        y = formulas.affine(wide, scale, beta, row)
    else:
        centered = formulas.emit(op.subtract(wide, formulas.emit(op.reshape(mean, row))))
        y = formulas.affine(formulas.affine(centered, scale, None, row), gamma, beta, row)
    return relax.Tuple([formulas.cast(y, dtype_of(x)), call.args[3], call.args[4]])
