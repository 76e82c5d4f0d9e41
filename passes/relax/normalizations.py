"""Formulas that the passes LowerBatchNorm, LowerLayerNorm and others share.

TVM can differentiate the operators of the formulas. As in PyTorch, mean and variance are computed
in two passes, so that a large mean costs no digits, and in float32 for half precisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

from tvmbridge.passes.base import PassReport, dtype_of, map_calls, shape_of

op = relax.op

# (call, formulas, report) -> the expression that replaces the call, or None if it was declined.
Definition = Callable[[relax.Call, "Formulas", PassReport], relax.Expr | None]

_HALVES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Moments:
    """The moments of a tensor ``x``.

    - ``centered``: ``x - mean``.
    - ``mean``: the mean, in which the reduced axes have extent 1.
    - ``variance``: the biased variance, in which the reduced axes have extent 1.
    """

    centered: relax.Expr
    mean: relax.Expr
    variance: relax.Expr


@dataclass(frozen=True)
class Formulas:
    """Formulas of norms; each method emits its operators through ``builder``."""

    builder: relax.BlockBuilder

    def emit(self, expr: relax.Expr) -> relax.Var:
        """Bind ``expr`` to a variable."""
        return self.builder.emit(expr)

    def cast(self, x: relax.Expr, dtype: str) -> relax.Expr:
        """Return ``x`` in ``dtype``."""
        return x if dtype_of(x) == dtype else self.emit(op.astype(x, dtype))

    def wide(self, x: relax.Expr) -> relax.Expr:
        """Return ``x`` in the dtype of its sums: float32 if ``x`` has half precision."""
        return self.cast(x, "float32") if dtype_of(x) in _HALVES else x

    def moments(self, x: relax.Expr, axes: Sequence[int]) -> Moments:
        """Return mean and variance over ``axes``, computed in two passes."""
        mean = self.emit(op.mean(x, list(axes), keepdims=True))
        centered = self.emit(op.subtract(x, mean))
        return Moments(centered, mean, self.mean_square(centered, axes))

    def mean_square(self, x: relax.Expr, axes: Sequence[int]) -> relax.Expr:
        """Return the mean of squares over ``axes``, whose extent becomes 1."""
        squares = self.emit(op.multiply(x, x))
        return self.emit(op.mean(squares, list(axes), keepdims=True))

    def inverse_root(self, variance: relax.Expr, epsilon: float) -> relax.Expr:
        """Return ``1 / sqrt(variance + epsilon)``."""
        shifted = self.emit(op.add(variance, relax.const(epsilon, dtype_of(variance))))
        return self.emit(op.rsqrt(shifted))

    def standardized(self, x: relax.Expr, axes: Sequence[int], epsilon: float) -> relax.Expr:
        """Return ``(x - mean) / sqrt(variance + epsilon)``, with the moments over ``axes``."""
        moments = self.moments(x, axes)
        return self.emit(
            op.multiply(moments.centered, self.inverse_root(moments.variance, epsilon))
        )

    def affine(
        self,
        x: relax.Expr,
        gamma: relax.Expr | None,
        beta: relax.Expr | None,
        shape: Sequence[int] | None = None,
    ) -> relax.Expr:
        """Return ``x * gamma + beta``, in the dtype of ``x``; either may be None.

        ``gamma`` and ``beta`` are reshaped to ``shape``, if it is given.
        """
        for parameter, combine in ((gamma, op.multiply), (beta, op.add)):
            if parameter is None:
                continue
            value = self.cast(parameter, dtype_of(x))
            if shape is not None and shape_of(value) != tuple(shape):
                value = self.emit(op.reshape(value, list(shape)))
            x = self.emit(combine(x, value))
        return x

    def result(
        self, call: relax.Call, normed: relax.Expr, channel: int | None = None
    ) -> relax.Expr:
        """Return ``normed * gamma + beta``, in the dtype of the operand of the norm ``call``.

        ``gamma`` and ``beta`` are arguments of ``call``. Each has one number for each index along
        the dimension ``channel``, or, if it is None, the shape of the last dimensions.
        """
        x = call.args[0]
        shape = None
        if channel is not None:
            extents = shape_of(x) or ()
            shape = channel_shape(len(extents), extents[channel], channel)[channel:]
        return self.cast(self.affine(normed, *affine_parameters(call), shape), dtype_of(x))


def affine_parameters(call: relax.Call) -> tuple[relax.Expr | None, relax.Expr | None]:
    """Return gamma and beta of a norm; None for one that the attributes of the call switch off."""
    gamma, beta = call.args[1:3]
    return gamma if call.attrs.scale else None, beta if call.attrs.center else None


def channel_shape(rank: int, channels: int, axis: int) -> list[int]:
    """Return the shape of ``rank`` dimensions with extent ``channels`` at ``axis``, 1 elsewhere."""
    return [channels if i == axis else 1 for i in range(rank)]


def lower_calls(
    mod: tvm.IRModule, name: str, definition: Definition, report: PassReport
) -> tvm.IRModule:
    """Return ``mod`` with each call of the operator ``name`` replaced by its definition."""
    operator = tvm.ir.Op.get(name)

    def lowered(call: relax.Call, builder: relax.BlockBuilder) -> relax.Expr:
        if call.op != operator:
            return call
        if shape_of(call.args[0]) is None:
            report.decline(name, "the shape is not static")
            return call
        result = definition(call, Formulas(builder), report)
        if result is None:
            return call
        report.rewrote()
        return result

    return map_calls(mod, lowered)
