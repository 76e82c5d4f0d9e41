"""Gradients of convolutions over images with few channels, by a faster kernel of PyTorch.

oneDNN computes the gradient of a convolution's data for whole vectors of channels: for 3 color
channels it computes 16. PyTorch has another kernel, which multiplies the cotangent by the weight
and sums the products that belong to each pixel.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from tvmbridge.core.decisions import Rule, decided
from tvmbridge.kernels.choice import as_precise, operands_to_measure, race
from tvmbridge.kernels.convolution import BACKWARD
from tvmbridge.kernels.table import choice

# This many channels fill a vector of AVX-512.
_ENOUGH_CHANNELS = 16
# The other kernel needs memory for the product, which may cost more on a busy machine than it did
# in the measurement.
_GAIN = 0.9
# Smaller gradients (in multiplications) take a few microseconds either way.
_WORTH_MEASURING = 1 << 20
_PRODUCT = "product"


@dataclass(frozen=True)
class DataGradient:
    """The gradient of a convolution's data.

    - ``cotangent``, ``data``, ``weight``: shapes of the tensors.
    - ``stride``, ``padding``: parameters of the convolution.
    """

    cotangent: tuple[int, ...]
    data: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]

    def usual(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the gradient by the kernel that eager PyTorch calls."""
        sizes = list(self.stride), list(self.padding), [1, 1], False, [0, 0], 1
        mask = [True, False, False]
        result: torch.Tensor = torch.ops.aten.convolution_backward(*tensors, None, *sizes, mask)[0]
        return result

    def by_product(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the gradient by the kernel that multiplies and sums."""
        sizes = self.weight[2:], self.stride, self.padding
        kernel = torch.ops.aten._slow_conv2d_backward.output_mask
        result: torch.Tensor = kernel(*tensors, *sizes, [True, False, False])[0]
        return result


def product_spec(spec: str, shapes: Sequence[tuple[int, ...]]) -> str | None:
    """Return the spec of an ATen call that computes the same gradient faster.

    None if the other kernel was not measured to be faster, or if the call computes anything but
    the gradient of data with few channels.
    """
    content = json.loads(spec)
    if content["op"] != BACKWARD or not torch.backends.mkldnn.is_available():
        return None
    *operands, _, stride, padding, dilation, transposed, _, groups, mask = content["args"]
    in_order = operands == [{"tensor": i} for i in range(3)]
    if not in_order or mask != [True, False, False] or content["results"] != [0]:
        return None
    cotangent, data, weight = shapes
    if transposed or groups != 1 or dilation != [1, 1] or data[1] >= _ENOUGH_CHANNELS:
        return None
    gradient = DataGradient(cotangent, data, weight, tuple(stride), tuple(padding))
    if not decided(Rule.MIDDLE, lambda: _is_faster(gradient)):
        return None
    sizes = [list(gradient.weight[2:]), stride, padding]
    other = {"op": "aten._slow_conv2d_backward.output_mask", "args": [*operands, *sizes, mask]}
    return json.dumps({**content, **other})


def _is_faster(gradient: DataGradient) -> bool:
    batch, _, height, width = gradient.cotangent
    if batch * height * width * prod(gradient.weight) < _WORTH_MEASURING:
        return False
    question = f"float32 {gradient}"
    return choice(question, ("", _PRODUCT), functools.partial(_faster, gradient)) == _PRODUCT


def _faster(gradient: DataGradient) -> str:
    shapes = [gradient.cotangent, gradient.data, gradient.weight]
    tensors = [t - 0.5 for t in operands_to_measure(shapes, torch.float32)]
    cotangent, data, weight = tensors
    with torch.no_grad():
        exact = gradient.usual([cotangent[:1].double(), data[:1].double(), weight.double()])
        found, usual = gradient.by_product(tensors), gradient.usual(tensors)
        if not as_precise(found, usual, exact, times=2):
            return ""
        candidates = (gradient.usual, gradient.by_product)
        first, second = race([functools.partial(run, tensors) for run in candidates])
    return _PRODUCT if second < _GAIN * first else ""
