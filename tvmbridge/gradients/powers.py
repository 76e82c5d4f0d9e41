"""Gradient rules of quotients and powers, with PyTorch's formulas.

The operations have PyTorch's order too. If a part overflows or a cotangent is infinite, the order
decides between an infinity and NaN.
"""

from __future__ import annotations

from tvm import relax
from tvm.ir import GenericConst

from tvmbridge.gradients.helpers import Differentiated, constant_like, fit_shape
from tvmbridge.legalize.powers import SHORT_EXPONENTS, exponent_of

op = relax.op


def has_short_form(call: relax.Call) -> bool:
    """Whether the exponent of ``call``, a ``relax.power``, is one of ``SHORT_EXPONENTS``."""
    return exponent_of(call) in SHORT_EXPONENTS


def divide(of: Differentiated) -> list[relax.Expr]:
    """Return the gradients of ``a / b`` for a cotangent g: g / b for a, and -g ((a / b) / b) for b.

    If ``a`` is the constant 1, the gradient for ``b`` is -g (1 / b)^2.
    """
    left, right = of.call.args
    reciprocal = isinstance(left, GenericConst) and not left.value.shape
    if reciprocal and left.value.numpy().item() == 1:
        slope = op.multiply(of.var, of.var)
    else:
        slope = op.divide(of.var, right)
    of_right = op.multiply(op.negative(of.cotangent), slope)
    return [
        fit_shape(of.builder, op.divide(of.cotangent, right), left),
        fit_shape(of.builder, of_right, right),
    ]


def power(of: Differentiated) -> list[relax.Expr]:
    """Return the gradient g (e x^(e - 1)) of ``x ** e``, with e among ``SHORT_EXPONENTS``."""
    x, exponent = of.call.args
    number = exponent_of(of.call)
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
        cube = op.abs(op.multiply(op.multiply(of.var, of.var), of.var))
        lower = op.where(op.equal(x, infinity), constant_like(x, 0.0), cube)
    slope = op.multiply(exponent, lower)
    return [op.multiply(of.cotangent, slope), op.grad.no_grad(exponent)]
