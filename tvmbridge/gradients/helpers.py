"""Small helpers that gradient rules share."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax


@dataclass(frozen=True)
class Differentiated:
    """A call whose gradients a rule returns.

    - ``var``: the variable that the call is bound to.
    - ``call``: the call.
    - ``cotangent``: the cotangent of ``var``.
    - ``builder``: emits the bindings of the gradients.
    """

    var: relax.Var
    call: relax.Call
    cotangent: relax.Var
    builder: relax.BlockBuilder

    @property
    def x(self) -> relax.Expr:
        """The first argument."""
        return self.call.args[0]


def shape_of(expr: relax.Expr) -> tuple[int, ...]:
    """Return the static shape of a tensor expression."""
    return tuple(int(extent) for extent in expr.ty.shape.values)


def constant_like(expr: relax.Expr, value: float) -> tvm.ir.GenericConst:
    """Return ``value`` as a 0-d constant with the dtype of ``expr``."""
    return relax.const(value, str(expr.ty.dtype))


def fit_shape(builder: relax.BlockBuilder, grad: relax.Expr, operand: relax.Expr) -> relax.Expr:
    """Sum ``grad`` over the dimensions along which ``operand`` was broadcast."""
    grad = builder.emit(grad)
    if shape_of(grad) == shape_of(operand):
        return grad
    return relax.op.collapse_sum_to(grad, operand.ty.shape)
