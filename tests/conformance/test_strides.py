"""Fake results have the same strides as real ones, for operators of OpInfo in five layouts."""

from __future__ import annotations

import pytest

from tests.conformance.strides import differences, operators

# Operators whose unpatched fake kernels give other strides, or whose kernels depend on the layout.
QUICK = ["roll", "xlogy", "copysign"]
NAMES = list(operators())


@pytest.mark.parametrize("name", QUICK)
def test_strides_of_operators(name: str) -> None:
    assert differences(operators()[name], 1) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(16))
def test_strides_of_all_operators(first: int) -> None:
    known = operators()
    found = {name: differences(known[name], 2) for name in NAMES[first::16]}
    assert not {name: different for name, different in found.items() if different}
