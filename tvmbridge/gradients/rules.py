"""Gradient rules for Relax operators for which TVM has no rule, or a wrong one.

Each rule returns one gradient for each argument of a call. ``no_grad`` of an argument means no
gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from tvm import relax

from tvmbridge.gradients.helpers import Differentiated, constant_like, fit_shape, shape_of
from tvmbridge.gradients.powers import divide, power
from tvmbridge.gradients.slopes import gelu_slope, gelu_tanh_slope, silu_slope
from tvmbridge.kernels.convolution import CONVOLUTIONS, Convolution


def _convolution(of: Differentiated) -> list[relax.Expr]:
    """Return the gradients of data and weight from separate calls of PyTorch's kernel.

    If a gradient is not wanted, dead code elimination removes its call. TVM has a rule for
    ``nn.conv2d`` only, and it raises an error if there is a dilation.
    """
    convolution = Convolution.of(of.call)
    assert convolution is not None, "the condition in CLAIMED asks for it"
    data, weight = of.call.args
    gradients = [
        of.builder.emit(convolution.gradient_call(of.cotangent, data, weight, position))
        for position in range(2)
    ]
    return [relax.TupleGetItem(gradient, 0) for gradient in gradients]


def is_plain(call: relax.Call) -> bool:
    """Whether the rule applies to ``call``: PyTorch's layouts, symmetric padding, one dtype."""
    return Convolution.of(call) is not None


CONVOLUTION_RULES = dict.fromkeys(CONVOLUTIONS, _convolution)


Rule = Callable[[Differentiated], list[relax.Expr]]

op = relax.op
no_grad = relax.op.grad.no_grad


def _relu(of: Differentiated) -> list[relax.Expr]:
    """Return the gradient of relu: 0 where the result is 0, otherwise the cotangent.

    At x = 0 it is 0, as in PyTorch.
    """
    zero = constant_like(of.cotangent, 0.0)
    return [op.where(op.less_equal(of.var, zero), zero, of.cotangent)]


def _abs(of: Differentiated) -> list[relax.Expr]:
    """Return the gradient of abs: the cotangent times sign(x), with sign(0) = 0."""
    return [op.multiply(of.cotangent, op.sign(of.x))]


def _rsqrt(of: Differentiated) -> list[relax.Expr]:
    """Return the gradient of y = x^(-1/2): the cotangent times -1/2 y^3."""
    cube = op.multiply(op.multiply(of.var, of.var), of.var)
    return [op.multiply(op.multiply(of.cotangent, constant_like(of.cotangent, -0.5)), cube)]


def _erf(of: Differentiated) -> list[relax.Expr]:
    """Return the gradient of erf: the cotangent times 2 / sqrt(pi) exp(-x^2)."""
    x = of.x
    slope = op.exp(op.negative(op.multiply(x, x)))
    return [
        op.multiply(of.cotangent, op.multiply(slope, constant_like(x, 2.0 / math.sqrt(math.pi))))
    ]


def _gelu(of: Differentiated) -> list[relax.Expr]:
    return [op.multiply(of.cotangent, gelu_slope(of.builder, of.x))]


def _gelu_tanh(of: Differentiated) -> list[relax.Expr]:
    return [op.multiply(of.cotangent, gelu_tanh_slope(of.builder, of.x))]


def _silu(of: Differentiated) -> list[relax.Expr]:
    return [op.multiply(of.cotangent, silu_slope(of.builder, of.x))]


def _where(of: Differentiated) -> list[relax.Expr]:
    """Return the gradients of where: each operand gets the cotangent where it was chosen.

    The gradient of an operand that was broadcast is summed to the operand's shape.
    """
    condition, left, right = of.call.args
    zero = constant_like(of.cotangent, 0.0)
    return [
        no_grad(condition),
        fit_shape(of.builder, op.where(condition, of.cotangent, zero), left),
        fit_shape(of.builder, op.where(condition, zero, of.cotangent), right),
    ]


def _extremum(loses: Callable[[relax.Expr, relax.Expr], relax.Expr]) -> Rule:
    def rule(of: Differentiated) -> list[relax.Expr]:
        """Return the gradients of maximum or minimum: the chosen operand gets the cotangent.

        Equal operands get half of the cotangent each. If an operand is NaN, both operands get the
        whole cotangent, as in PyTorch.
        """
        left, right = of.call.args
        zero = constant_like(of.cotangent, 0.0)
        half = op.multiply(of.cotangent, constant_like(of.cotangent, 0.5))
        kept = of.builder.emit(op.where(op.equal(left, right), half, of.cotangent))
        return [
            fit_shape(of.builder, op.where(loses(left, right), zero, kept), left),
            fit_shape(of.builder, op.where(loses(right, left), zero, kept), right),
        ]

    return rule


def _strided_slice(of: Differentiated) -> list[relax.Expr]:
    """Return the gradient of a slice: zeros, with the cotangent at the slice's position.

    Steps must be 1 (see ``CLAIMED``).
    """
    source = shape_of(of.x)
    axes = [int(a.value) % len(source) for a in of.call.args[1].fields]
    begins = [int(b.value) for b in of.call.args[2].fields]
    grad = of.cotangent
    for axis, begin in zip(axes, begins, strict=True):
        begin = slice(begin, None).indices(source[axis])[0]
        have = shape_of(grad)
        extents = (begin, source[axis] - begin - have[axis])
        before, after = (
            [_zeros([*have[:axis], extent, *have[axis + 1 :]], of.cotangent)] if extent else []
            for extent in extents
        )
        if before or after:
            pieces = [of.builder.emit(z) for z in before], [of.builder.emit(z) for z in after]
            grad = of.builder.emit(op.concat([*pieces[0], grad, *pieces[1]], axis))
    return [grad, *[no_grad(a) for a in of.call.args[1:]]]


def _zeros(shape: list[int], like: relax.Expr) -> relax.Expr:
    return op.full(shape, constant_like(like, 0.0), _dtype(like))


def _concat(of: Differentiated) -> list[relax.Expr]:
    """Return the gradients of concat: each tensor gets its piece of the cotangent."""
    axis = int(of.call.attrs.axis)
    extents = [int(field.shape.values[axis]) for field in of.call.args[0].ty.fields]
    if len(extents) == 1:
        return [relax.Tuple([of.cotangent])]
    return [op.split(of.cotangent, list(itertools.accumulate(extents[:-1])), axis)]


def _dtype(expr: relax.Expr) -> str:
    return str(expr.ty.dtype)


def _extreme_of(of: Differentiated) -> list[relax.Expr]:
    """Return the gradient of max or min over axes: ties share the cotangent evenly."""
    x = of.x
    shape = shape_of(x)
    listed = range(len(shape)) if of.call.attrs.axis is None else of.call.attrs.axis
    axes = [int(a) % len(shape) for a in listed]
    kept = [1 if i in axes else extent for i, extent in enumerate(shape)]
    result = of.builder.emit(op.reshape(of.var, kept))
    grad = of.builder.emit(op.reshape(of.cotangent, kept))
    ties = of.builder.emit(op.astype(op.equal(x, result), _dtype(of.cotangent)))
    count = of.builder.emit(op.sum(ties, axes, keepdims=True))
    # In this order an infinite cotangent gives NaN at the other elements, as in PyTorch.
    return [op.divide(op.multiply(grad, ties), count)]


def _tile(of: Differentiated) -> list[relax.Expr]:
    """Return the gradient of tile: the sum of the cotangents of all copies."""
    shape = list(shape_of(of.x))
    repeats = [int(r) for r in of.call.attrs.repeats]
    rank = max(len(shape), len(repeats))
    shape_full = [1] * (rank - len(shape)) + shape
    repeats = [1] * (rank - len(repeats)) + repeats
    split = [v for pair in zip(repeats, shape_full, strict=True) for v in pair]
    copies = of.builder.emit(op.reshape(of.cotangent, split))
    summed = of.builder.emit(op.sum(copies, list(range(0, 2 * rank, 2))))
    return [op.reshape(summed, shape)]


def _flip(of: Differentiated) -> list[relax.Expr]:
    return [op.flip(of.cotangent, int(of.call.attrs.axis))]


def _take(of: Differentiated) -> list[relax.Expr]:
    """Return the gradient of take: add each row of the cotangent to the row that it was taken from.

    Indices must be one-dimensional (see ``CLAIMED``).
    """
    x, indices = of.call.args
    axis = int(of.call.attrs.axis) % len(shape_of(x))
    grad = op.grad.take_backward(of.cotangent, x, indices, axis=axis)
    return [grad, no_grad(indices)]


def _stop(of: Differentiated) -> list[relax.Expr]:
    return [no_grad(a) for a in of.call.args]


OWN_RULES: dict[str, Rule] = {
    "relax.grad.no_grad": _stop,
    "relax.full": _stop,
    "relax.nn.relu": _relu,
    "relax.abs": _abs,
    "relax.rsqrt": _rsqrt,
    "relax.erf": _erf,
    "relax.divide": divide,
    "relax.power": power,
    "relax.nn.silu": _silu,
    "relax.nn.gelu": _gelu,
    "relax.nn.gelu_tanh": _gelu_tanh,
    "relax.where": _where,
    "relax.maximum": _extremum(op.less),
    "relax.minimum": _extremum(op.greater),
    "relax.concat": _concat,
    "relax.strided_slice": _strided_slice,
    "relax.max": _extreme_of,
    "relax.min": _extreme_of,
    "relax.tile": _tile,
    "relax.flip": _flip,
    "relax.take": _take,
}
