"""Distinguish rounding from mistakes: the departure of a value, its bound, and the verdict.

**Departure.** The *departure* of a value is its largest absolute difference from eager PyTorch in
the same precision, divided by the *scale* of the value. The scale is the largest magnitude of the
value's elements. After cancellation the scale is larger: the magnitude of the summands, which is
estimated from how far rounding moves the value. An example is the gradient of the bias of
attention's keys: it is zero, since softmax is invariant to shifts. If NaN and infinities are not at
the same elements, the departure is infinite.

**Bound.** Eager PyTorch runs again several times, with the result of every operation changed
randomly by up to one unit of rounding (Monte Carlo arithmetic: Parker, 1997). The largest change of
a value is its *rounding noise*, in this module, on these inputs, in this precision. Compiled code
may add in another order and use other kernels for exp or tanh. So its rounding errors differ from
eager PyTorch's, but have the same size: up to about 5 times the rounding noise in the modules of
the tests. The bound is :data:`FACTOR` times the rounding noise, but at least :data:`FLOOR` units of
rounding of the scale. The minimum is needed because a value may show no rounding by chance.

**Verdict.** From float32 to float64, rounding noise shrinks by 5e8. A departure by rounding shrinks
with it, and stays within the bound in both precisions. A mistake does not shrink. GELU by tanh, for
example, departs by 1e-4 in both. Rounding may explain this in float32, but never in float64. So a
departure is a *mistake* if it exceeds the bound in either precision, *rounding* if it is not zero,
and otherwise the value *agrees*.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

FACTOR = 50.0
FLOOR = 16.0

# If rounding moves a value by more than this many units of rounding of its magnitude, the value is
# the rest of a cancellation.
_CANCELLED = 1000.0

AGREES, ROUNDING, MISTAKE = "agrees", "rounding", "mistake"


@dataclass(frozen=True)
class Measure:
    """Measures departures of one value in one precision.

    - ``reference``: the value in eager PyTorch.
    - ``noise``: how far rounding moves the value, absolute.
    - ``scale``: the magnitude that departures are relative to.
    - ``bound``: the largest departure that rounding explains.
    """

    reference: torch.Tensor
    noise: float
    scale: float
    bound: float

    @classmethod
    def of(cls, reference: torch.Tensor, noise: float, eps: float) -> Measure:
        """Compute scale and bound of a value.

        Args:
            noise: how far rounding moves the value, absolute.
            eps: the largest unit of rounding among the dtypes of the computation.
        """
        magnitude = float(_finite(reference).abs().max()) if reference.numel() else 0.0
        scale = magnitude
        if noise > _CANCELLED * eps * magnitude:
            scale = noise / eps
        unit = torch.finfo(reference.dtype).eps if reference.is_floating_point() else 0.0
        bound = max(FACTOR * noise / scale, FLOOR * unit) if scale > 0 else 0.0
        return cls(reference, noise, scale, bound)

    def departure(self, value: torch.Tensor | None, other: torch.Tensor | None = None) -> float:
        """Return how far ``value`` is from the reference or ``other``; inf if absent or unlike."""
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
    """Return the verdict on a departure in the module's dtype and in float64."""
    if error > bound or error_float64 > bound_float64:
        return MISTAKE
    return ROUNDING if error > 0 or error_float64 > 0 else AGREES
