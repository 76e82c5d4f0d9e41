"""Check one sequence of sizes for each model; ``python -m tests.random_sizes`` runs many."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.random_sizes.models import MODELS
from tests.random_sizes.sequences import difference, drawn, run

# One sequence of each model. In 19 and 29, tokens after a cache of even length were once read from
# the wrong row. Number 10 has lengths of 16 n + 1, which once made code read out of bounds.
NUMBERS = [*range(len(MODELS)), 10, 19, 29]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", NUMBERS)
def test_sequences_of_sizes_agree_with_eager(number: int) -> None:
    outcome = run(drawn(number))
    assert outcome.result == "right", outcome.reason
    assert number != 10 or outcome.served == outcome.calls


def test_sequences_are_the_same_for_a_number_and_differences_are_told() -> None:
    assert drawn(7) == drawn(7) != replace(drawn(17), number=7)
    exact = [torch.ones(3, dtype=torch.float64)]
    near, far = [torch.ones(3) + 1e-7], [torch.ones(3) + 1e-3]
    assert difference(near, near, exact) is None
    assert "off by 0.001" in str(difference(far, near, exact))
    assert "finite elsewhere" in str(difference([torch.full((3,), torch.inf)], near, exact))
    assert "is (2,)" in str(difference([torch.ones(2)], near, exact))
