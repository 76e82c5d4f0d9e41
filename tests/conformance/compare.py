"""Compare two results in structure, dtype, shape and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


def compare(ours: Any, theirs: Any, *, values: bool) -> str | None:
    """Describe how two results differ in structure, dtype, shape or values; None if they agree."""
    left, left_spec = pytree.tree_flatten(ours)
    right, right_spec = pytree.tree_flatten(theirs)
    if len(left) != len(right) or str(left_spec) != str(right_spec):
        return f"the structure is {left_spec} instead of {right_spec}"
    for a, b in zip(left, right, strict=True):
        difference = _compare_leaf(a, b, values=values)
        if difference:
            return difference
    return None


def _compare_leaf(ours: Any, theirs: Any, *, values: bool) -> str | None:
    if not isinstance(theirs, torch.Tensor):
        same = ours == theirs or (ours != ours and theirs != theirs)
        return None if same else f"{ours!r} instead of {theirs!r}"
    if not isinstance(ours, torch.Tensor):
        return f"a {type(ours).__name__} instead of a tensor"
    if ours.dtype != theirs.dtype:
        return f"dtype {ours.dtype} instead of {theirs.dtype}"
    if ours.shape != theirs.shape:
        return f"shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}"
    if not values:
        return None
    try:
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())[:600]
    return None


def is_as_near(
    ours: Any, theirs: Any, reference: Any, computed_in: Sequence[torch.dtype] = ()
) -> bool:
    """Whether each tensor of a result agrees with eager's, or differs by rounding alone.

    Errors are taken against the float64 reference. A difference counts as rounding if our error is
    at most twice eager's, or four units in the last place of the largest element. Sums in another
    order differ by that much if terms cancel. Eager PyTorch itself rounds differently for other
    strides of the same values.

    The unit is taken in the coarsest dtype among the result's own and ``computed_in``. Eager
    PyTorch sums a cotangent in the cotangent's dtype before it widens the sum to the operand's.
    """
    if compare(ours, theirs, values=False):
        return False
    leaves = [pytree.tree_leaves(x) for x in (ours, theirs, reference)]
    coarsest = max((torch.finfo(d).eps for d in computed_in), default=0.0)
    return all(
        _compare_leaf(a, b, values=True) is None or _leaf_is_as_near(a, b, r, coarsest)
        for a, b, r in zip(*leaves, strict=True)
    )


def _leaf_is_as_near(ours: Any, theirs: Any, reference: Any, coarsest: float) -> bool:
    if not isinstance(theirs, torch.Tensor) or not theirs.is_floating_point():
        return False
    error, bound = _error(ours, reference), _error(theirs, reference)
    if bound == float("inf"):
        return False
    finite = reference.double()[reference.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    unit = max(torch.finfo(theirs.dtype).eps, coarsest)
    return error <= max(2 * bound, 4 * unit * largest)


def _error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest error; infinite if NaN or an infinity is in another place."""
    if result.shape != reference.shape:
        return float("inf")
    # An operator that creates a tensor itself may put it on another device than its inputs.
    wide, exact = result.double().cpu(), reference.double().cpu()
    finite = exact.isfinite()
    for test in (torch.isfinite, torch.isnan, torch.isposinf):
        if not torch.equal(test(wide), test(exact)):
            return float("inf")
    errors = (wide[finite] - exact[finite]).abs()
    return float(errors.max()) if errors.numel() else 0.0
