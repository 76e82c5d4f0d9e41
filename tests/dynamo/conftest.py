"""Each test begins without graphs of others."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def no_graphs() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
