"""Convolutions round as their dtype says; products do so unless told otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_tf32() -> Iterator[None]:
    # By the context: PyTorch's test utilities, once imported, forbid assignments.
    cudnn = torch.backends.cudnn
    with cudnn.flags(
        enabled=cudnn.enabled,
        benchmark=cudnn.benchmark,
        deterministic=cudnn.deterministic,
        allow_tf32=False,
    ):
        yield
