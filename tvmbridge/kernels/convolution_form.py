"""3x3 convolutions that keep the size of images, and their gradients: sizes and operands."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

Shape = tuple[int, ...]


class ConvolutionResult(Enum):
    """The tensor that a kernel computes: the convolution's result, or one of its gradients."""

    RESULT = "result"
    """The result, computed from data, weight and perhaps a bias."""
    DATA = "data's gradient"
    """The gradient of the data, computed from cotangent and weight."""
    WEIGHT = "weight's gradient"
    """The gradient of the weight, computed from cotangent and data."""


@dataclass(frozen=True)
class SameConvolution:
    """A 3x3 convolution with stride 1 and padding 1, or one of its gradients.

    The data has the shape (batch, channels, height, width), the weight (filters, channels, 3, 3).

    - ``part``: the tensor that is computed.
    - ``biased``: whether a bias is added to the result.
    """

    part: ConvolutionResult
    batch: int
    channels: int
    filters: int
    height: int
    width: int
    biased: bool = False

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the operands, ordered as in :class:`ConvolutionResult`, and the result."""
        data = (self.batch, self.channels, self.height, self.width)
        result = (self.batch, self.filters, self.height, self.width)
        weight = (self.filters, self.channels, 3, 3)
        if self.part is ConvolutionResult.DATA:
            return result, weight, data
        if self.part is ConvolutionResult.WEIGHT:
            return result, data, weight
        return data, weight, *([(self.filters,)] if self.biased else []), result

    @property
    def work(self) -> int:
        """The number of multiplications of the direct method."""
        return 9 * self.batch * self.channels * self.filters * self.height * self.width

    @staticmethod
    def of(
        part: ConvolutionResult, data: Shape, weight: Shape, biased: bool = False
    ) -> SameConvolution:
        """Return the form of a convolution from the shapes of data and of a 3x3 weight."""
        batch, channels, height, width = data
        return SameConvolution(part, batch, channels, weight[0], height, width, biased)
