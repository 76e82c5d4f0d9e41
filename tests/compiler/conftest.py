"""Fixtures: a module with packed weights, compiled once for all tests that use it."""

from __future__ import annotations

import pytest
from torch import nn

from tests.packed_helpers import dispatched, packed_copy


@pytest.fixture(scope="session")
def served() -> nn.Module:
    """Return a dispatched module; tests use copies of it."""
    return dispatched()


@pytest.fixture
def module(served: nn.Module) -> nn.Module:
    """Return a copy of the dispatched module, with packed weights."""
    return packed_copy(served)
