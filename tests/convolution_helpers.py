"""The reference for tests of convolution schedules: PyTorch's functional convolution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional, grad

from tvmbridge.kernels.convolution_form import ConvolutionResult, SameConvolution


def by_definition(form: SameConvolution, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a 3x3 convolution, or its data or weight gradient, in the operands' dtype."""
    first, second, *bias = operands
    if form.part is ConvolutionResult.DATA:
        return grad.conv2d_input(list(form.shapes[-1]), second, first, padding=1)
    if form.part is ConvolutionResult.WEIGHT:
        return grad.conv2d_weight(second, list(form.shapes[-1]), first, padding=1)
    return functional.conv2d(first, second, *bias, padding=1)
