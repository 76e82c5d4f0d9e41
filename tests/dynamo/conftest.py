"""Reset Dynamo before each test, so that no graphs of other tests remain."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def no_graphs() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
