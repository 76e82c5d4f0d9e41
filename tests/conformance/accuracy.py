"""The accuracy check: compiled results must be about as close to float64 as eager results.

Eager PyTorch may round once where compiled code rounds at each step, and the tolerances of the
other checks hide that loss. This check compares the errors of both against float64, in units in
the last place (ulp).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.conformance.case import Case
from tests.conformance.check import Check
from tests.conformance.compare import compare

# Largest eager error, in ulp, that is compared; random draws and cancellation cause larger ones.
_MEANINGLESS = 100.0

# Fraction of the largest element: the ulp of a smaller one does not measure the error of a sum.
_SMALL = 1e-3


class AccuracyCheck(Check):
    """A check that compares the errors of results and gradients with the errors of eager's."""

    def difference(self, case: Case, ours: Any, theirs: Any) -> str | None:
        """Describe the first tensor that is less accurate than eager's; None if there is none."""
        shape = compare(ours, theirs, values=False)
        exact = None if shape else self.exact(case, theirs)
        if exact is None:
            return shape
        parts = [pytree.tree_leaves((v[0], v[2])) for v in (ours, theirs, exact)]
        return less_accurate(*parts)


def less_accurate(ours: Sequence[Any], theirs: Sequence[Any], exact: Sequence[Any]) -> str | None:
    """Describe the first tensor whose error is about twice eager's or more; None if there is none.

    Args:
        ours: leaves of the compiled result; leaves that are no floating-point tensors are skipped.
        theirs: the same leaves from eager PyTorch.
        exact: the same leaves from eager PyTorch in float64.
    """
    for place, (mine, first, right) in enumerate(zip(ours, theirs, exact, strict=True)):
        errors = _errors(mine, first, right)
        if errors is None:
            continue
        off, of_eager = errors
        chance = 0.05 + 0.5 / off.numel() ** 0.5
        on_average = off.mean() > 1.75 * of_eager.mean() + chance
        if on_average or off.max() > 2 * of_eager.max() + 1:
            return (
                f"tensor {place} {tuple(first.shape)} is off by {off.mean():.3g} units in the last "
                f"place ({off.max():.3g} at most), eager's by {of_eager.mean():.3g} "
                f"({of_eager.max():.3g})"
            )
    return None


def _errors(ours: Any, theirs: Any, exact: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the errors of ours and of eager's finite elements in ulp; None if not comparable."""
    tensors = (ours, theirs, exact)
    if not all(isinstance(t, torch.Tensor) and t.is_floating_point() for t in tensors):
        return None
    if theirs.dtype is torch.float64:
        return None
    wide = [t.detach().double() for t in tensors]
    finite = torch.stack([t.isfinite() for t in wide]).all(0)
    if not bool(finite.any()):
        return None
    mine, first, right = (t[finite] for t in wide)
    size = right.abs()
    least = max(_SMALL * float(size.max()), torch.finfo(theirs.dtype).tiny)
    unit = torch.finfo(theirs.dtype).eps * size.clamp(min=least)
    off, of_eager = (mine - right).abs() / unit, (first - right).abs() / unit
    return None if of_eager.max() > _MEANINGLESS else (off, of_eager)
