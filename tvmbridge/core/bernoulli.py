"""Masks of zeros and ones: the draws of ``bernoulli_(p)``, made faster where they stay the same.

On processors that are not Intel's PyTorch draws one number after the other, 6 ns each, which is a
fifteenth of a transformer's step in training. ``_bernoulli.cpp`` makes the same numbers of the same
generator in a tenth of that. Whether they are the same is tried once in a process, against PyTorch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tvmbridge.core.compiled_half import compiled_half

_TRIED = 3000


def draw_mask(mask: torch.Tensor, probability: float) -> torch.Tensor:
    """``mask.bernoulli_(probability)``, with the same numbers and the same generator after it.

    Args:
        mask: any tensor; those of bool on the CPU without gaps are drawn faster.
        probability: of ones, from 0 to 1.

    Raises:
        RuntimeError: ``probability`` is not from 0 to 1.
    """
    plain = type(mask) is torch.Tensor and mask.is_cpu and mask.dtype is torch.bool
    fill = _compiled() if plain and 0.0 <= probability <= 1.0 else None
    if fill is None or not torch.ops.aten.is_non_overlapping_and_dense(mask):
        return mask.bernoulli_(probability)
    fill(mask.data_ptr(), mask.numel(), probability, torch.default_generator)
    return mask


@functools.cache
def _compiled() -> Any:
    """The compiled function; None where it was not built, or PyTorch draws other numbers."""
    half = compiled_half("tvmbridge.core._bernoulli")
    return half.fill_mask if half is not None and _draws_alike(half.fill_mask) else None


def _draws_alike(fill: Any) -> bool:
    mine, theirs = (torch.Generator("cpu").manual_seed(0) for _ in range(2))
    for probability in (0.9, 0.25):
        found, expected = torch.zeros(2, _TRIED, dtype=torch.bool, device="cpu")
        fill(found.data_ptr(), _TRIED, probability, mine)
        expected.bernoulli_(probability, generator=theirs)
        if not torch.equal(found, expected):
            return False
    return torch.equal(mine.get_state(), theirs.get_state())
