"""Gradient rules of quotients and powers, with PyTorch's formulas.

The operations have PyTorch's order too. If a part overflows or a cotangent is infinite, the order
decides between an infinity and NaN.
"""

from __future__ import annotations

from tvm import relax
from tvm.ir import GenericConst

from tvmbridge.gradients.helpers import constant_like, fit_shape
from tvmbridge.legalize.powers import SHORT_EXPONENTS, exponent_of

op = relax.op


def has_short_form(call: relax.Call) -> bool:
    """Whether the exponent of ``call``, a ``relax.power``, is one of ``SHORT_EXPONENTS``."""
    return exponent_of(call) in SHORT_EXPONENTS


def divide(
    var: relax.Var, call: relax.Call, cotangent: relax.Var, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    """Return the gradients of ``a / b`` for a cotangent g: g / b for a, and -g ((a / b) / b) for b.

    If ``a`` is the constant 1, the gradient for ``b`` is -g (1 / b)^2.
    """
    left, right = call.args
    reciprocal = isinstance(left, GenericConst) and not left.value.shape
    if reciprocal and left.value.numpy().item() == 1:
        slope = op.multiply(var, var)
    else:
        slope = op.divide(var, right)
    of_right = op.multiply(op.negative(cotangent), slope)
    return [
        fit_shape(builder, op.divide(cotangent, right), left),
        fit_shape(builder, of_right, right),
    ]


def power(
    var: relax.Var, call: relax.Call, cotangent: relax.Var, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    """Return the gradient g (e x^(e - 1)) of ``x ** e``, with e among ``SHORT_EXPONENTS``."""
    x, exponent = call.args
    number = exponent_of(call)
    one, infinity = constant_like(x, 1.0), constant_like(x, float("-inf"))
    if number == 2:
        lower = x
    elif number == 3:
        lower = op.multiply(x, x)
    elif number == -1:
        lower = op.divide(one, op.multiply(x, x))
    elif number == -2:
        # In two steps, because the cube overflows long before its reciprocal underflows.
        lower = op.divide(op.divide(one, x), op.multiply(x, x))
    else:
        # x^(-3/2) is +inf at both zeros, and 0 at both infinities.
        cube = op.abs(op.multiply(op.multiply(var, var), var))
        lower = op.where(op.equal(x, infinity), constant_like(x, 0.0), cube)
    slope = op.multiply(exponent, lower)
    return [op.multiply(cotangent, slope), op.grad.no_grad(exponent)]
