"""Measure when each piece of work of a step ran: by torch.profiler, or by events on a GPU."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tvmbridge.distributed.orders import Span, Work
from tvmbridge.distributed.stage import EngineStage

_NAME = re.compile(r"([FBIW])(\d+)\.(\d+)")
_MARK = "tvmbridge.pipeline.mark"


def measured_step(
    run: Callable[[], None], stages: Sequence[EngineStage], device: torch.device
) -> list[Span]:
    """Run a step and wait for the device; return this rank's spans in seconds of the host."""
    for stage in stages:
        stage.marks = True
        stage.events.clear()
    try:
        timed = _by_events if device.type == "cuda" else _by_profiler
        spans = timed(run, stages, device)
    finally:
        for stage in stages:
            stage.marks = False
            stage.events.clear()
    return sorted(spans, key=lambda span: span.start)


def _by_profiler(
    run: Callable[[], None], stages: Sequence[EngineStage], device: torch.device
) -> list[Span]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with record_function(_MARK):
            began = time.time_ns() / 1e9
        run()
    return _spans(profiler.events(), began)


def _spans(events: Any, began: float) -> list[Span]:
    """Return the marked ranges; one mark converts the profiler's clock to the host's."""
    mark = min(e.time_range.start for e in events if e.name == _MARK)
    found = []
    for event in events:
        work = _work(event.name)
        if work is not None:
            start = began + (event.time_range.start - mark) / 1e6
            end = began + (event.time_range.end - mark) / 1e6
            found.append(Span(work, start, end))
    return found


def _by_events(
    run: Callable[[], None], stages: Sequence[EngineStage], device: torch.device
) -> list[Span]:
    """Return the spans from events: another thread launches backward, which has no ranges."""
    torch.cuda.synchronize(device)
    began = time.time_ns() / 1e9
    first = torch.cuda.Event(enable_timing=True)
    first.record(torch.cuda.current_stream(device))
    run()
    found = []
    for stage in stages:
        for name, start, end in stage.events:
            work = _work(name)
            assert work is not None
            times = (began + first.elapsed_time(event) / 1e3 for event in (start, end))
            found.append(Span(work, *times))
    return found


def _work(name: str) -> Work | None:
    match = _NAME.fullmatch(name)
    return None if match is None else Work(match[1], int(match[2]), int(match[3]))
