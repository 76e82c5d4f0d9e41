"""Gradient rules of convolutions: calls of PyTorch's backward kernel, one for each operand.

TVM has a rule for ``nn.conv2d`` only, and it raises an error if there is a dilation.
"""

from __future__ import annotations

from tvm import relax

from tvmbridge.kernels.convolution import CONVOLUTIONS, Convolution


def _convolution(
    var: relax.Var, call: relax.Call, cotangent: relax.Var, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    """Return the gradients of data and weight from separate calls.

    If a gradient is not wanted, dead code elimination removes its call.
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
