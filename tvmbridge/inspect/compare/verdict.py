"""Rounding or mistake: the measure of a departure and the bound that tells them apart.

**Measure.** The *departure* of a value is the largest absolute difference of its elements from
eager PyTorch in the same precision, over the *scale* of the value: the largest magnitude of its
elements. A value that is what cancellation left (the gradient of a key's bias is zero, since
softmax does not see a shift) has another scale: the magnitude of what was summed up, which shows in
how far rounding moves the value. NaN and infinities must stand in the same places; where they do
not, the departure is infinite.

**Bound.** Eager PyTorch runs again with every result of every operation moved by up to one unit of
rounding (Monte Carlo arithmetic: Parker, 1997). How far that moves a value is its *noise*: what
rounding does to this value, in this module, on these numbers, in this precision. Compiled code may
add in another order and use other kernels for exp or tanh, so its error is not that of eager, but
of the same size: up to about 5 times the noise in the modules of the tests. The bound is
:data:`FACTOR` times the noise, and at least :data:`FLOOR` units of rounding of the scale (a short
value is sometimes computed without error, by luck).

**Verdict.** Noise shrinks with the precision: from float32 to float64 by 5e8. A departure by
rounding shrinks with it and stays under the bound in both. A mistake does not: GELU by tanh is off
by 1e-4 in float32, which some modules' rounding explains, and by 1e-4 in float64, which none does.
So a departure is a *mistake* when it is over the bound in either precision, *rounding* when it is
not zero, otherwise the value *agrees*.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

FACTOR = 50.0
FLOOR = 16.0

# Where rounding moves a value by more than so many units of its own magnitude, it is a remainder.
_CANCELLED = 1000.0

AGREES, ROUNDING, MISTAKE = "agrees", "rounding", "mistake"


@dataclass(frozen=True)
class Measure:
    """How to measure departures of one value in one precision."""

    reference: torch.Tensor
    noise: float
    scale: float
    bound: float

    @classmethod
    def of(cls, reference: torch.Tensor, noise: float, eps: float) -> Measure:
        """The measure of a value.

        Args:
            reference: what eager PyTorch computes.
            noise: by how much rounding moves it (absolute).
            eps: the unit of rounding of the computation, the largest of its dtypes'.
        """
        magnitude = float(_finite(reference).abs().max()) if reference.numel() else 0.0
        scale = magnitude
        if noise > _CANCELLED * eps * magnitude:
            scale = noise / eps
        unit = torch.finfo(reference.dtype).eps if reference.is_floating_point() else 0.0
        bound = max(FACTOR * noise / scale, FLOOR * unit) if scale > 0 else 0.0
        return cls(reference, noise, scale, bound)

    def departure(self, value: torch.Tensor | None, other: torch.Tensor | None = None) -> float:
        """The departure of ``value`` from ``other``, by default from the reference."""
        against = self.reference if other is None else other
        if value is None or value.shape != against.shape or value.dtype != against.dtype:
            return math.inf
        if not value.numel():
            return 0.0
        a, b = value.double(), against.double()
        special = ~(a.isfinite() & b.isfinite())
        if bool((special & (a != b) & ~(a.isnan() & b.isnan())).any()):
            return math.inf
        difference = float(torch.where(special, 0.0, a - b).abs().max())
        if difference == 0.0:
            return 0.0
        return difference / self.scale if self.scale > 0 else math.inf


def _finite(value: torch.Tensor) -> torch.Tensor:
    return value.double().nan_to_num(0.0, 0.0, 0.0)


def verdict(error: float, bound: float, error_float64: float, bound_float64: float) -> str:
    """The verdict on a departure in the module's dtype and in float64."""
    if error > bound or error_float64 > bound_float64:
        return MISTAKE
    return ROUNDING if error > 0 or error_float64 > 0 else AGREES
