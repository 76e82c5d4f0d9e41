"""Compiled stages under PyTorch's schedules without bubbles compute nothing twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import zero_bubble_scripts as scripts
from tests.distributed.processes import run_ranks, values


@pytest.fixture
def _group_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RANK", raising=False)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group_of_one")
def test_both_stages_of_one_process_equal_eager_stages() -> None:
    assert_trained([scripts.train(0, 1, 4)], 4)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (2, 8), (4, 8)])
def test_stages_of_several_processes_equal_eager_stages(ranks: int, microbatches: int) -> None:
    assert_trained(values(run_ranks(scripts.train, ranks, ranks, microbatches)), microbatches)


def assert_trained(outcomes: list[dict[str, Any]], microbatches: int) -> None:
    ranks = len(outcomes)
    losses, states = scripts.by_one_process(2 * ranks, microbatches)
    for name in scripts.SCHEDULES:
        seen, halves = [], 0
        for found in (outcome[name] for outcome in outcomes):
            if found["losses"] is not None:
                torch.testing.assert_close(found["losses"], losses, rtol=1e-12, atol=1e-12)
            for stage, state in zip(found["stages"], found["states"], strict=True):
                torch.testing.assert_close(state, states[stage], rtol=1e-12, atol=1e-12)
            assert_each_half_ran_once(found)
            seen += found["stages"]
            halves += sum(counted["inputs"] for counted in found["counted"])
        assert sorted(seen) == list(range(2 * ranks))
        # With one rank DualPipeV separates the halves of the first stage alone.
        assert halves or (name, ranks) == ("DualPipeV", 1)


def assert_each_half_ran_once(found: dict[str, Any]) -> None:
    for stage, counted, planned, fallbacks in zip(
        found["stages"], found["counted"], found["planned"], found["fallbacks"], strict=True
    ):
        assert fallbacks == {}
        wanted = Counter(forward=planned["F"])
        if stage:  # the first stage has no gradients of inputs
            wanted += Counter(inputs=planned["I"], weights=planned["W"])
            assert planned["I"] == planned["W"]
        assert counted == wanted
