"""Random masks of zeros and ones: ``bernoulli_(p)``, computed faster with the same results.

On processors that are not Intel's, PyTorch draws the numbers one by one, 6 ns each. That is a
fifteenth of a transformer's training step. ``_bernoulli.cpp`` draws the same numbers from the same
generator in a tenth of the time. Each process checks once that both draw the same numbers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tvmbridge.core.compiled_half import compiled_half

_TRIED = 3000


def draw_mask(mask: torch.Tensor, probability: float) -> torch.Tensor:
    """Do ``mask.bernoulli_(probability)``: equal numbers, and the generator in the same state.

    Args:
        mask: any tensor; dense bool tensors on the CPU are filled faster.

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
    """Return the compiled function; None if it is missing or PyTorch draws other numbers."""
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
