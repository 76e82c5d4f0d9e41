"""Ranks that decide differently train as in eager PyTorch, and a killed rank ends the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed import agreement_scripts as scripts
from tests.distributed.processes import run_ranks, values


def test_a_module_that_exchanges_tensors_is_refused_by_name() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = scripts.exchanging(0)
    assert set(found) == {kind.__name__ for kind in scripts.EXCHANGING}
    for name, (furthest, reason) in found.items():
        assert furthest <= 1e-12, name
        assert "exchanges tensors with other processes" in reason, (name, reason)


@pytest.mark.slow
def test_the_exchanges_of_a_capture_do_not_meet_those_of_another_rank() -> None:
    """One rank dispatches its module, and the other runs eager PyTorch."""
    for found in values(run_ranks(scripts.exchanging, 2)):
        for name, (furthest, _) in found.items():
            assert furthest <= 1e-12, name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_slow_rank_and_a_refusal_change_nothing(strategy: str) -> None:
    """Of four ranks one compiles longer, and another one serves no call by compiled code."""
    outcomes = values(run_ranks(scripts.unlike_ranks, 4, strategy, 3.0))
    for rank, (furthest, served, fallbacks) in enumerate(outcomes):
        assert furthest <= 1e-12
        assert (served, fallbacks) == ((0, 6) if rank == 2 else (6, 0))


@pytest.mark.slow
def test_ranks_that_compile_together_decide_alike() -> None:
    """One rank is slower than a collective's timeout, and another refuses one of the blocks."""
    outcomes = values(run_ranks(scripts.together, 4, 8.0, 7.0))
    for rank, found in enumerate(outcomes):
        assert found["furthest"] <= 1e-5
        first, second, last = found["calls"]
        assert first == second == (3, ())
        calls, (reason,) = last
        assert not calls
        assert "a planted refusal" in reason
        assert rank == 2 or "rank 2 has no compiled code" in reason
        # Rank 0 measures and compiles for all.
        assert bool(found["measured"]) == bool(found["built"]) == (rank == 0), rank


@pytest.mark.slow
def test_tensor_parallel_layers_run_eagerly_beside_compiled_ones() -> None:
    for found in values(run_ranks(scripts.tensor_parallel, 2)):
        assert max(furthest for furthest, _, _ in found.values()) <= 1e-12
        assert (found["norm"][1], found["norm"][2]) == (3, ())
        # The sum of the row-wise layer arrives as an AsyncCollectiveTensor.
        assert found["head"][2] == ("an argument is not a plain tensor",)
        (reason,) = found["middle"][2]
        assert "parallelize_module" in reason


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_training_resumes_after_a_killed_rank(strategy: str, tmp_path: Path) -> None:
    (whole, _) = values(run_ranks(scripts.pretrain, 2, strategy, "", 4, None))
    first, second = run_ranks(scripts.pretrain, 2, strategy, str(tmp_path), 4, 3)
    assert second.ended
    assert first.error
    (resumed, _) = values(run_ranks(scripts.pretrain, 2, strategy, str(tmp_path), 4, None))
    assert resumed == pytest.approx(whole[2:], rel=1e-6)
