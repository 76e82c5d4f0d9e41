"""Pipelines whose stages are not compiled on GPUs, though each stage could be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.models import Language, tokens
from tvmbridge.distributed.compiling import unproven
from tvmbridge.distributed.plan import plan_pipeline

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("settings", "tied", "reason"),
    [
        ({"schedule": "simple", "stages": 4}, False, "schedule"),
        ({"schedule": "interleaved", "stages": 4}, True, "share parameters"),
        ({"schedule": "interleaved", "stages": 4}, False, None),
        ({"schedule": "simple", "stages": 2}, True, None),
    ],
)
def test_pipelines_with_wrong_gradients_on_gpus(
    settings: dict[str, Any], tied: bool, reason: str | None
) -> None:
    inputs, _ = tokens()
    plan = plan_pipeline(Language(tied=tied), inputs, microbatches=4, ranks=2, **settings)
    assert unproven(plan, torch.device("cpu")) is None
    told = unproven(plan, GPU)
    assert told is None if reason is None else reason in str(told)
