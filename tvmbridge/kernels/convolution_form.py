"""Convolutions of 3x3 that leave pictures their size, and their gradients: sizes and operands."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

Shape = tuple[int, ...]


class ConvolutionResult(Enum):
    """What is computed, and from what."""

    RESULT = "result"
    """From data, weight and perhaps bias."""
    DATA = "data's gradient"
    """From cotangent and weight."""
    WEIGHT = "weight's gradient"
    """From cotangent and data."""


@dataclass(frozen=True)
class SameConvolution:
    """A convolution of 3x3, stride 1 and padding 1, or one of its gradients.

    The data is (batch, channels, height, width), the weight (filters, channels, 3, 3).
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
        """Of the operands, in the order of :class:`ConvolutionResult`, and of the result."""
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
        """How many multiplications it is, as it is defined."""
        return 9 * self.batch * self.channels * self.filters * self.height * self.width

    @staticmethod
    def of(
        part: ConvolutionResult, data: Shape, weight: Shape, biased: bool = False
    ) -> SameConvolution:
        """The convolution of data and weight of these shapes, whose kernel is 3x3."""
        batch, channels, height, width = data
        return SameConvolution(part, batch, channels, weight[0], height, width, biased)
