"""When each piece of work ran in a real step, by torch.profiler."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tvmbridge.distributed.orders import Span, Work
from tvmbridge.distributed.stage import EngineStage

_NAME = re.compile(r"([FBW])(\d+)\.(\d+)")
_MARK = "tvmbridge.pipeline.mark"


def measured_step(
    run: Callable[[], Any], stages: Sequence[EngineStage], device: torch.device
) -> tuple[list[Span], Any]:
    """Run a step; when this rank did what, in seconds of the host's clock, and its result.

    On a GPU the times are those of the kernels that a piece of work has launched.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    for stage in stages:
        stage.marks = True
    try:
        with profile(activities=activities) as profiler:
            with record_function(_MARK):
                began = time.time_ns() / 1e9
            result = run()
            if on_gpu:
                torch.cuda.synchronize(device)
    finally:
        for stage in stages:
            stage.marks = False
    return _spans(profiler.events(), began, on_gpu), result


def _spans(events: Any, began: float, on_gpu: bool) -> list[Span]:
    """The marked ranges; the mark tells the profiler's clock from the host's."""
    kind = "CUDA" if on_gpu else "CPU"
    mark = min(
        e.time_range.start for e in events if e.name == _MARK and e.device_type.name == "CPU"
    )
    found = []
    for event in events:
        match = _NAME.fullmatch(event.name)
        if match is not None and event.device_type.name == kind:
            start = began + (event.time_range.start - mark) / 1e6
            end = began + (event.time_range.end - mark) / 1e6
            found.append(Span(Work(match[1], int(match[2]), int(match[3])), start, end))
    return sorted(found, key=lambda span: span.start)
