"""The accuracy rule of PyTorch's harness: close to eager, or nearly as close to float64."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_HALVES = (torch.float16, torch.bfloat16)
_LOOSE = 2e-2
_FEW = 1000
_SIMILAR = 0.99


def differing(
    exact: Mapping[str, torch.Tensor] | None,
    eager: Mapping[str, torch.Tensor],
    found: Mapping[str, torch.Tensor],
    tolerance: float,
) -> str | None:
    """Return which result differs and by how much; None if all results pass.

    Args:
        exact: the results in float64, by name; None if the model cannot run in float64, for want
            of memory for instance. PyTorch's harness then compares directions.
        eager: the results of eager PyTorch.
        found: the results to judge.
        tolerance: the model's tolerance, both absolute and relative.
    """
    if eager.keys() != found.keys():
        return f"results {sorted(eager.keys() ^ found.keys())[:3]} are not those of eager PyTorch"
    for name, reference in eager.items():
        result = found[name]
        if result.dtype is not reference.dtype or result.shape != reference.shape:
            return f"{name} is {result.dtype} {tuple(result.shape)}"
        if not reference.is_floating_point():
            if not torch.equal(reference, result):
                return f"{name} differs"
            continue
        if torch.allclose(reference, result, atol=tolerance, rtol=tolerance, equal_nan=True):
            continue
        if exact is None:
            similarity = float(_cosine(reference, result))
            if not similarity >= _SIMILAR:
                return f"{name} has a cosine similarity of {similarity:.4f}"
            continue
        ours, theirs = _rmse(exact[name], result), _rmse(exact[name], reference)
        if not ours <= _multiplier(reference, tolerance) * theirs + tolerance / 10:
            return f"{name} is {ours:.2g} from float64, eager PyTorch {theirs:.2g}"
    return None


def _multiplier(reference: torch.Tensor, tolerance: float) -> float:
    small = reference.numel() < _FEW or reference.shape[-2:] == (1, 1)
    return 3.0 if reference.dtype in _HALVES or small or tolerance >= _LOOSE else 2.0


def _cosine(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(
        expected.double().flatten(), found.double().flatten(), dim=0
    )


def _rmse(expected: torch.Tensor, found: torch.Tensor) -> float:
    return float((expected.double() - found.double()).square().mean().sqrt())
