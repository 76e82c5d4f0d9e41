"""Fake results have the same strides as real ones, for operators of OpInfo in five layouts."""

from __future__ import annotations

import pytest

from tests.conformance.strides import operators, tally
from tests.thinned import thinned

# Operators whose unpatched fake kernels give other strides, or whose kernels depend on the layout.
QUICK = [
    "roll",
    "xlogy",
    "copysign",
    "_native_batch_norm_legit",  # writes into an operand
    "nn.functional.gaussian_nll_loss",  # an operator of tvmbridge in a trace
    "nn.functional.max_pool1d",  # another kernel for fake tensors
    "nn.functional.rrelu",
]
NAMES = list(operators())


@pytest.mark.parametrize("name", thinned(QUICK, 2))
def test_strides_of_operators(name: str) -> None:
    found = tally(operators()[name], 3)
    assert found.equal
    assert found.differences == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(16))
def test_strides_of_all_operators(first: int) -> None:
    known = operators()
    found = {name: tally(known[name], 2).differences for name in NAMES[first::16]}
    assert not {name: different for name, different in found.items() if different}
