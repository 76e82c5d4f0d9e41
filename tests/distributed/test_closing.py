"""The end of a pipeline: its groups are freed, and the work of a stuck GPU is aborted."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.distributed import scripts
from tests.distributed.processes import run_ranks, values
from tests.distributed.scripts import group_count
from tvmbridge.core.errors import PipelineError
from tvmbridge.distributed.control import Control
from tvmbridge.distributed.watch import Poller


@pytest.fixture
def control() -> Iterator[Control]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Control(timeout=0.6)
    dist.destroy_process_group()


def test_a_closed_pipeline_leaves_no_group(control: Control) -> None:
    control.new_group([0])
    assert group_count() == 4
    control.close()
    control.close()
    assert group_count() == 1
    with pytest.raises(PipelineError, match="the pipeline is closed"):
        control.gather(1, "for a number")


def test_the_group_of_all_may_be_destroyed_before(control: Control) -> None:
    dist.destroy_process_group()
    control.close()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_a_failed_pipeline_is_closed_without_the_others(control: Control) -> None:
    control.failed("the disk is full")
    control.close()
    assert group_count() == 1
    with pytest.raises(PipelineError, match="has failed before: the disk is full"):
        control.require_open()


def test_what_is_stuck_in_a_launch_is_aborted(control: Control) -> None:
    aborted: list[str] = []
    control._abortable.append(SimpleNamespace(abort=lambda: aborted.append("now")))
    with control.launching():
        for _ in range(3):
            control.launches()
            time.sleep(0.1)
            assert not control._watched()
        assert not aborted
        time.sleep(0.6)
        control._watched()
        assert aborted == ["now"]
    with pytest.raises(PipelineError, match=r"rank 0 hung, which did not come within 0\.6 s"):
        _wait(control)


def _wait(control: Control) -> None:
    with control.guarded(lambda: "hung"):
        control.wait_for(torch.device("cpu"))


class Watched:
    """An object that counts the calls of ``look``."""

    def __init__(self) -> None:
        self.looks = 0

    def look(self) -> bool:
        self.looks += 1
        return False


def test_a_watch_ends_with_what_it_watches() -> None:
    watched = Watched()
    watch, other = Poller(watched.look), Poller(watched.look)
    other.end()
    time.sleep(0.5)
    assert 1 <= watched.looks < 20
    gone = weakref.ref(watched)
    del watched
    gc.collect()
    assert gone() is None
    watch._thread.join(30)
    assert not watch._thread.is_alive()


@pytest.mark.slow
def test_a_process_makes_several_pipelines() -> None:
    """Build several pipelines of one module, whose parameters are already on the rank's device."""
    for found in values(run_ranks(scripts.closed, 2)):
        assert found == [1, 1, 1]


@pytest.mark.slow
def test_a_pipeline_that_one_rank_closes() -> None:
    first, second = run_ranks(scripts.closed_by_one, 2)
    assert first.kind == second.kind == "PipelineError"
    assert "rank 1 (stage 1) did not come within 3 s to close the pipeline" in (first.error or "")
    assert "rank 0 (stage 0)" in (second.error or "") or "did not come" in (second.error or "")
