"""Timelines of a training step with and without overlapped communication, by torch.profiler.

``torchrun --nproc-per-node 2 -m examples.dlrm.timeline FILE`` writes rank 0's timelines as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import tvmbridge
from examples.dlrm.clicks import Clicks
from examples.dlrm.model import Sizes
from examples.dlrm.train import Place, Step, join, make
from tvmbridge.passes.fx.combine_sparse_inputs import CombineSparseInputs
from tvmbridge.passes.fx.feature_fusion import FeatureFusion
from tvmbridge.passes.fx.horizontal_fusion import HorizontalFusion
from tvmbridge.passes.fx.overlap_communication import OverlapCommunication

SIZES = Sizes(features=16, rows=1000, width=32, hidden=512)
ROWS = 512
CHOICES: dict[str, tuple[Any, ...]] = {
    "before": (CombineSparseInputs(), FeatureFusion(), HorizontalFusion()),
    "after": (CombineSparseInputs(), FeatureFusion(), HorizontalFusion(), OverlapCommunication()),
}


def spans(place: Place, passes: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Profile a step; return its operators and collectives.

    Each has a name, a thread, a start and a duration in microseconds.
    """
    model = make(SIZES, place)
    batch = Clicks(SIZES, ROWS, place.rank, place.world)[0].to(place.device)
    tvmbridge.optimize_fx(model, (batch.dense, batch.features), passes, measure=False)
    step = Step(model, place)
    for _ in range(3):
        step(batch)
    activities = [ProfilerActivity.CPU]
    if place.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    dist.barrier()
    with profile(activities=activities) as profiled:
        step(batch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    found = [e for e in events if e.get("ph") == "X" and e.get("cat") in ("cpu_op", "kernel")]
    found += [e for e in events if e.get("ph") == "X" and e["name"].startswith(("gloo:", "nccl:"))]
    return [{k: e[k] for k in ("name", "tid", "ts", "dur")} for e in found]


def main(path: str) -> None:
    """Write the timelines without and with overlapped communication."""
    place = join()
    found = {name: spans(place, passes) for name, passes in CHOICES.items()}
    if not place.rank:
        Path(path).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
