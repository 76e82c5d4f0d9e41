"""Faults with real processes: each rank ends with an error that says where; none hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import checkpoint_scripts, scripts, tied_scripts
from tests.distributed.processes import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("schedule", ["simple", "interleaved"])
@pytest.mark.parametrize("first", [0, 3])
def test_an_exception_in_backward(schedule: str, first: int) -> None:
    """Check failures in the first and in the last micro-batch.

    In the last one the last stage has finished already, but its optimizer must not step either.
    """
    for outcome in run_ranks(scripts.fail_backward, 2, first, schedule):
        assert outcome.kind == "PipelineError"
        assert "stage 0 on rank 0 failed in backward of micro-batch" in (outcome.error or "")
        assert "RuntimeError: no gradient today" in (outcome.error or "")


@pytest.mark.parametrize("schedule", ["simple", "interleaved"])
def test_a_killed_rank(schedule: str) -> None:
    first, second = run_ranks(scripts.fail, 2, "killed", 1, 20.0, schedule)
    assert second.ended
    assert first.kind == "PipelineError"
    assert "rank 0 (stage 0) waited for" in (first.error or "")
    assert "stage 1 on rank 1" in (first.error or "")
    assert seconds(first.error) < 20


def test_the_rank_that_keeps_the_store_is_killed() -> None:
    first, second = run_ranks(scripts.fail, 2, "killed", 0, 20.0)
    assert first.ended
    assert second.kind == "PipelineError"
    assert "stage 0 on rank 0" in (second.error or "")


def test_a_rank_that_stands_still() -> None:
    """Check a rank that sleeps: the other rank waits no longer than the timeout."""
    first, second = run_ranks(scripts.fail, 2, "sleeps", 1, 6.0)
    assert first.kind == "PipelineError"
    assert "stage 1 on rank 1" in (first.error or "")
    assert 4 < seconds(first.error) < 12
    assert second.kind == "PipelineError"


def test_a_rank_between_others_is_killed() -> None:
    first, second, third = run_ranks(scripts.fail, 3, "killed", 1, 20.0)
    assert second.ended
    for outcome in (first, third):
        assert outcome.kind == "PipelineError"
        assert "stage 1 on rank 1" in (outcome.error or "")


def test_of_three_ranks_all_end() -> None:
    outcomes = run_ranks(scripts.fail, 3, "raises", 1, 20.0)
    for outcome in outcomes:
        assert outcome.kind == "PipelineError"
        assert "stage 1 on rank 1 failed in forward of micro-batch 0" in (outcome.error or "")


def test_other_batches_on_other_ranks() -> None:
    for outcome in run_ranks(scripts.other_batch, 2):
        assert outcome.kind == "PipelineError"
        assert "rank 1 (stage 1) was given another batch than rank 0 (stage 0)" in (
            outcome.error or ""
        )


def test_a_batch_that_the_microbatches_do_not_divide() -> None:
    for outcome in run_ranks(scripts.indivisible, 2):
        assert outcome.kind == "PipelineError"
        assert "a batch of 6 cannot be cut into 4 micro-batches; 1, 2, 3, 6 would fit" in (
            outcome.error or ""
        )


@pytest.mark.parametrize("joins", [True, False])
def test_a_rank_that_did_not_come(joins: bool) -> None:
    first, _ = run_ranks(scripts.absent, 2, joins)
    assert first.kind == "PipelineError"
    assert "3 s" in (first.error or "")
    assert ("rank 1 did not come" if joins else "not all came") in (first.error or "")


def test_a_failed_pipeline_says_so_again() -> None:
    for outcome in run_ranks(scripts.step_after_failure, 2):
        assert outcome.kind == "PipelineError"
        assert "the pipeline has failed before: stage 1 on rank 1" in (outcome.error or "")


def test_another_module_on_one_rank() -> None:
    for outcome in run_ranks(scripts.other_module, 2):
        assert outcome.kind == "PipelineError"
        assert "rank 1 has another module or sample than rank 0" in (outcome.error or "")


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one() -> None:
    for outcome in run_ranks(checkpoint_scripts.broken_checkpoint, 2):
        assert outcome.kind == "PipelineError"
        assert "the checkpoint cannot be saved: rank 1 (stage 1)" in (outcome.error or "")


def test_a_rank_that_is_killed_while_it_saves_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    first, second = run_ranks(checkpoint_scripts.killed_while_saving, 2, str(tmp_path / "saved"))
    assert second.ended
    assert first.kind == "PipelineError"
    assert "rank 0 (stage 0) waited for rank 1 (stage 1)" in (first.error or "")
    assert (tmp_path / "saved").is_dir()


def test_a_shared_parameter_that_begins_with_different_values() -> None:
    for outcome in run_ranks(tied_scripts.other_weights, 2):
        assert outcome.kind == "PipelineError"
        assert (
            "rank 1 (stage 1) and rank 0 (stage 0) share embedding.weight, and begin with different"
            in (outcome.error or "")
        )


def seconds(error: str | None) -> float:
    """Return the seconds that the rank waited, which the script appends to its error."""
    return float((error or "").rpartition("[")[2].partition(" ")[0])
