"""Gradient rules of convolutions: PyTorch's own kernels, one call for each operand.

TVM's rule for ``nn.conv2d`` raises for a dilation, and it has none for the others.
"""

from __future__ import annotations

from tvm import relax

from tvmbridge.kernels.convolution import CONVOLUTIONS, Convolution


def _convolution(
    var: relax.Var, call: relax.Call, cotangent: relax.Var, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    """The gradients of data and weight, computed apart: what nobody wants is dead code."""
    convolution = Convolution.of(call)
    assert convolution is not None, "the condition in CLAIMED asks for it"
    data, weight = call.args
    gradients = [
        builder.emit(convolution.gradient_call(cotangent, data, weight, position))
        for position in range(2)
    ]
    return [relax.TupleGetItem(gradient, 0) for gradient in gradients]


def is_plain(call: relax.Call) -> bool:
    """Whether the rule holds for ``call``: PyTorch has such a convolution."""
    return Convolution.of(call) is not None


CONVOLUTION_RULES = dict.fromkeys(CONVOLUTIONS, _convolution)
