"""A pipeline over two processes trains like one process, and an error ends all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import scripts
from tests.distributed.models import Language, cross_entropy, reference_steps, tokens
from tests.distributed.processes import run_ranks, values


def expected(steps: int = 3, **model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    clip = model.pop("clip", None)
    module = Language(**model).double().train()
    losses = reference_steps(module, cross_entropy, [tokens()] * steps, 4, scripts.sgd, clip)
    return losses, module.state_dict()


def assert_equal(found: dict[str, Any], losses: torch.Tensor, state: dict[str, Any]) -> None:
    torch.testing.assert_close(found["losses"], losses, rtol=1e-12, atol=1e-12)
    assert list(found["state"]) == list(state)
    for name, tensor in state.items():
        torch.testing.assert_close(found["state"][name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=pytest.mark.slow) for name in ("simple", "interleaved")]
)
def test_training_equals_one_process(schedule: str) -> None:
    """Check the simplest pipeline: two stages, cut by hand, both compiled by TVM."""
    outcomes = run_ranks(scripts.train, 2, {"stages": ["blocks.2"], "schedule": schedule})
    for found in values(outcomes):
        assert_equal(found, *expected())
        assert found["eager"] == {0: None, 1: None}
        assert found["share"] == 1.0


def test_an_exception_in_one_stage_ends_all_ranks() -> None:
    first, second = run_ranks(scripts.fail, 2, "raises", 1, 20.0)
    for outcome in (first, second):
        assert outcome.kind == "PipelineError"
        assert "stage 1 on rank 1 failed in forward of micro-batch 0" in (outcome.error or "")
        assert "ValueError: the disk is full" in (outcome.error or "")
