"""DistributedDataParallel over gloo: backward in parts trains as eager PyTorch, and overlaps."""

from __future__ import annotations

from tests.distributed import data_parallel_scripts as scripts
from tests.distributed.processes import run_ranks, values


def test_backward_in_parts_trains_as_eager_pytorch_and_buckets_go_between_the_parts() -> None:
    for found in values(run_ranks(scripts.compared, 2)):
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
