"""DistributedDataParallel over gloo: backward in parts trains as eager PyTorch, and overlaps."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.distributed import data_parallel_scripts as scripts
from tests.distributed.processes import run_ranks, values


def check(found: dict[str, tuple[float, int, list[str]]]) -> None:
    assert set(found) == set(scripts.SETTINGS)
    for name, (furthest, calls, events) in found.items():
        setting = scripts.SETTINGS[name]
        # The hook rounds to bfloat16: one unit in its last place may differ.
        assert furthest <= (1e-2 if setting.hook else 1e-12), (name, furthest)
        assert calls == (6 if setting.accumulate or setting.twice else 3), name
        assert events.count("part") > 3, name
    events = found["bfloat16"][2]
    last = len(events) - 1 - events[::-1].index("part")
    assert "bucket" in events[:last], events


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_buckets_are_exchanged_between_the_parts_of_backward() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    check(scripts.compared(0, parts=3))


@pytest.mark.slow
def test_backward_in_parts_trains_as_eager_pytorch() -> None:
    for found in values(run_ranks(scripts.compared, 2)):
        check(found)
