"""A module with packed weights, compiled once for all tests that use one."""

from __future__ import annotations

import pytest
from torch import nn

from tests.packed_helpers import dispatched, packed_copy


@pytest.fixture(scope="session")
def served() -> nn.Module:
    """A dispatched module, of which tests take copies."""
    return dispatched()


@pytest.fixture
def module(served: nn.Module) -> nn.Module:
    """A copy of it whose weights are packed."""
    return packed_copy(served)
