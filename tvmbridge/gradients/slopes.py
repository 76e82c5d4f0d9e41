"""Derivatives of activations, for the gradient rules and for converters of backward operators."""

from __future__ import annotations

import math

from tvm import relax

from tvmbridge.gradients.helpers import constant_like

op = relax.op


def gelu_slope(builder: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    """Return Phi(x) + x phi(x); Phi is the normal distribution function and phi its density."""
    half, one = constant_like(x, 0.5), constant_like(x, 1.0)
    phi = op.multiply(half, op.add(one, op.erf(op.multiply(x, constant_like(x, 1 / math.sqrt(2))))))
    density = op.multiply(
        op.exp(op.multiply(op.multiply(x, x), constant_like(x, -0.5))),
        constant_like(x, 1.0 / math.sqrt(2.0 * math.pi)),
    )
    return builder.emit(op.add(phi, op.multiply(x, density)))


def gelu_tanh_slope(builder: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    """Return the derivative of x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    beta, kappa = math.sqrt(2.0 / math.pi), 0.044715
    square = builder.emit(op.multiply(x, x))
    cubic = op.add(x, op.multiply(constant_like(x, kappa), op.multiply(square, x)))
    tanh = builder.emit(op.tanh(op.multiply(constant_like(x, beta), cubic)))
    one, half = constant_like(x, 1.0), constant_like(x, 0.5)
    inner = op.multiply(
        constant_like(x, beta), op.add(one, op.multiply(constant_like(x, 3.0 * kappa), square))
    )
    slope = op.multiply(op.multiply(x, op.subtract(one, op.multiply(tanh, tanh))), inner)
    return builder.emit(op.multiply(half, op.add(op.add(one, tanh), slope)))


def silu_slope(builder: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    """Return s + x s (1 - s), where s is the sigmoid of x."""
    one, sigmoid = constant_like(x, 1.0), builder.emit(op.sigmoid(x))
    rest = op.multiply(x, op.subtract(one, sigmoid))
    return builder.emit(op.multiply(sigmoid, op.add(one, rest)))
