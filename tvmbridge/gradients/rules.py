"""Gradient rules for Relax operators for which TVM has no rule, or a wrong one.

Each rule has TVM's signature: ``rule(var, call, cotangent, builder)`` returns one gradient for
each argument of ``call``, which is bound to ``var``. ``no_grad`` of an argument means no gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from tvm import relax

from tvmbridge.gradients.helpers import constant_like, fit_shape, shape_of
from tvmbridge.gradients.powers import divide, power
from tvmbridge.kernels.convolution import CONVOLUTIONS, Convolution


def _convolution(
    var: relax.Var, call: relax.Call, cotangent: relax.Var, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    """Return the gradients of data and weight from separate calls of PyTorch's kernel.

    If a gradient is not wanted, dead code elimination removes its call. TVM has a rule for
    ``nn.conv2d`` only, and it raises an error if there is a dilation.
    """
    convolution = Convolution.of(call)
    assert convolution is not None, "the condition in CLAIMED asks for it"
    data, weight = call.args
    gradients = [
        builder.emit(convolution.gradient_call(cotangent, data, weight, position))
        for position in range(2)
    ]
    return [relax.TupleGetItem(gradient, 0) for gradient in gradients]


def is_plain(call: relax.Call) -> bool:
    """Whether the rule applies to ``call``: PyTorch's layouts, symmetric padding, one dtype."""
    return Convolution.of(call) is not None


CONVOLUTION_RULES = dict.fromkeys(CONVOLUTIONS, _convolution)


Rule = Callable[[relax.Var, relax.Call, relax.Var, relax.BlockBuilder], list[relax.Expr]]

op = relax.op
no_grad = relax.op.grad.no_grad


def _relu(
    var: relax.Var, call: relax.Call, cotangent: relax.Var, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    """Return the gradient of relu: 0 where the result is 0, otherwise the cotangent.

    At x = 0 it is 0, as in PyTorch.
    """
    zero = constant_like(cotangent, 0.0)
    return [op.where(op.less_equal(var, zero), zero, cotangent)]


def _abs(
    var: relax.Var, call: relax.Call, cotangent: relax.Var, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    """Return the gradient of abs: the cotangent times sign(x), with sign(0) = 0."""
    return [op.multiply(cotangent, op.sign(call.args[0]))]


def _rsqrt(
    var: relax.Var, call: relax.Call, cotangent: relax.Var, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    """Return the gradient of y = x^(-1/2): the cotangent times -1/2 y^3."""
    cube = op.multiply(op.multiply(var, var), var)
    return [op.multiply(op.multiply(cotangent, constant_like(cotangent, -0.5)), cube)]


def _erf(
    var: relax.Var, call: relax.Call, cotangent: relax.Var, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    """Return the gradient of erf: the cotangent times 2 / sqrt(pi) exp(-x^2)."""
    x = call.args[0]
    slope = op.exp(op.negative(op.multiply(x, x)))
    return [op.multiply(cotangent, op.multiply(slope, constant_like(x, 2.0 / math.sqrt(math.pi))))]


def _gelu(
    var: relax.Var, call: relax.Call, cotangent: relax.Var, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    """Return the gradient of gelu: the cotangent times Phi(x) + x phi(x).

    Phi is the distribution function of the normal distribution, phi its density.
    """
    x = call.args[0]
    half, one = constant_like(x, 0.5), constant_like(x, 1.0)
    phi = op.multiply(half, op.add(one, op.erf(op.multiply(x, constant_like(x, 1 / math.sqrt(2))))))
    density = op.multiply(
        op.exp(op.multiply(op.multiply(x, x), constant_like(x, -0.5))),
        constant_like(x, 1.0 / math.sqrt(2.0 * math.pi)),
    )
    return [op.multiply(cotangent, op.add(phi, op.multiply(x, density)))]


def _gelu_tanh(
    var: relax.Var, call: relax.Call, cotangent: relax.Var, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    """Return the gradient of x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    x = call.args[0]
    emit = builder.emit
    beta, kappa = math.sqrt(2.0 / math.pi), 0.044715
    square = emit(op.multiply(x, x))
    cubic = op.add(x, op.multiply(constant_like(x, kappa), op.multiply(square, x)))
    tanh = emit(op.tanh(op.multiply(constant_like(x, beta), cubic)))
    one, half = constant_like(x, 1.0), constant_like(x, 0.5)
    inner = op.multiply(
        constant_like(x, beta), op.add(one, op.multiply(constant_like(x, 3.0 * kappa), square))
    )
    slope = op.multiply(op.multiply(x, op.subtract(one, op.multiply(tanh, tanh))), inner)
    return [op.multiply(cotangent, op.multiply(half, op.add(op.add(one, tanh), slope)))]


def _silu(
    var: relax.Var, call: relax.Call, cotangent: relax.Var, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    """Return the gradient of silu: the cotangent times s + x s (1 - s), with the sigmoid s of x."""
    x = call.args[0]
    one, sigmoid = constant_like(x, 1.0), builder.emit(op.sigmoid(x))
    rest = op.multiply(x, op.subtract(one, sigmoid))
    return [op.multiply(cotangent, op.multiply(sigmoid, op.add(one, rest)))]


def _where(
    var: relax.Var, call: relax.Call, cotangent: relax.Var, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    """Return the gradients of where: each operand gets the cotangent where it was chosen.

    The gradient of an operand that was broadcast is summed to the operand's shape.
    """
    condition, left, right = call.args
    zero = constant_like(cotangent, 0.0)
    return [
        no_grad(condition),
        fit_shape(builder, op.where(condition, cotangent, zero), left),
        fit_shape(builder, op.where(condition, zero, cotangent), right),
    ]


def _extremum(loses: Callable[[relax.Expr, relax.Expr], relax.Expr]) -> Rule:
    def rule(
        var: relax.Var, call: relax.Call, cotangent: relax.Var, builder: relax.BlockBuilder
    ) -> list[relax.Expr]:
        """Return the gradients of maximum or minimum: the chosen operand gets the cotangent.

        Equal operands get half of the cotangent each. If an operand is NaN, both operands get the
        whole cotangent, as in PyTorch.
        """
        left, right = call.args
        zero = constant_like(cotangent, 0.0)
        half = op.multiply(cotangent, constant_like(cotangent, 0.5))
        kept = builder.emit(op.where(op.equal(left, right), half, cotangent))
        return [
            fit_shape(builder, op.where(loses(left, right), zero, kept), left),
            fit_shape(builder, op.where(loses(right, left), zero, kept), right),
        ]

    return rule


def _strided_slice(
    var: relax.Var, call: relax.Call, cotangent: relax.Var, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    """Return the gradient of a slice: zeros, with the cotangent at the slice's position.

    Steps must be 1 (see ``CLAIMED``).
    """
    source = shape_of(call.args[0])
    axes = [int(a.value) % len(source) for a in call.args[1].fields]
    begins = [int(b.value) for b in call.args[2].fields]
    grad = cotangent
    for axis, begin in zip(axes, begins, strict=True):
        begin = slice(begin, None).indices(source[axis])[0]
        have = shape_of(grad)
        extents = (begin, source[axis] - begin - have[axis])
        before, after = (
            [_zeros([*have[:axis], extent, *have[axis + 1 :]], cotangent)] if extent else []
            for extent in extents
        )
        if before or after:
            pieces = [builder.emit(z) for z in before], [builder.emit(z) for z in after]
            grad = builder.emit(op.concat([*pieces[0], grad, *pieces[1]], axis))
    return [grad, *[no_grad(a) for a in call.args[1:]]]


def _zeros(shape: list[int], like: relax.Expr) -> relax.Expr:
    return op.full(shape, constant_like(like, 0.0), _dtype(like))


def _concat(
    var: relax.Var, call: relax.Call, cotangent: relax.Var, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    """Return the gradients of concat: each tensor gets its piece of the cotangent."""
    axis = int(call.attrs.axis)
    extents = [int(field.shape.values[axis]) for field in call.args[0].ty.fields]
    if len(extents) == 1:
        return [relax.Tuple([cotangent])]
    return [op.split(cotangent, list(itertools.accumulate(extents[:-1])), axis)]


def _dtype(expr: relax.Expr) -> str:
    return str(expr.ty.dtype)


def _extreme_of(
    var: relax.Var, call: relax.Call, cotangent: relax.Var, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    """Return the gradient of max or min over axes: ties share the cotangent evenly."""
    x = call.args[0]
    shape = shape_of(x)
    listed = range(len(shape)) if call.attrs.axis is None else call.attrs.axis
    axes = [int(a) % len(shape) for a in listed]
    kept = [1 if i in axes else extent for i, extent in enumerate(shape)]
    result = builder.emit(op.reshape(var, kept))
    grad = builder.emit(op.reshape(cotangent, kept))
    ties = builder.emit(op.astype(op.equal(x, result), _dtype(cotangent)))
    count = builder.emit(op.sum(ties, axes, keepdims=True))
    # In this order an infinite cotangent gives NaN at the other elements, as in PyTorch.
    return [op.divide(op.multiply(grad, ties), count)]


def _tile(
    var: relax.Var, call: relax.Call, cotangent: relax.Var, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    """Return the gradient of tile: the sum of the cotangents of all copies."""
    shape = list(shape_of(call.args[0]))
    repeats = [int(r) for r in call.attrs.repeats]
    rank = max(len(shape), len(repeats))
    shape_full = [1] * (rank - len(shape)) + shape
    repeats = [1] * (rank - len(repeats)) + repeats
    split = [v for pair in zip(repeats, shape_full, strict=True) for v in pair]
    copies = builder.emit(op.reshape(cotangent, split))
    summed = builder.emit(op.sum(copies, list(range(0, 2 * rank, 2))))
    return [op.reshape(summed, shape)]


def _flip(
    var: relax.Var, call: relax.Call, cotangent: relax.Var, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    return [op.flip(cotangent, int(call.attrs.axis))]


def _take(
    var: relax.Var, call: relax.Call, cotangent: relax.Var, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    """Return the gradient of take: add each row of the cotangent to the row that it was taken from.

    Indices must be one-dimensional (see ``CLAIMED``).
    """
    x, indices = call.args
    axis = int(call.attrs.axis) % len(shape_of(x))
    grad = op.grad.take_backward(cotangent, x, indices, axis=axis)
    return [grad, no_grad(indices)]


def _stop(
    var: relax.Var, call: relax.Call, cotangent: relax.Var, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    return [no_grad(a) for a in call.args]


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
