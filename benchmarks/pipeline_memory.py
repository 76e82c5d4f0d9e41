"""The peak memory of activations on one rank, in a step of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.peak_memory import give_back, kibibytes
from tvmbridge.distributed import PipelineRunner

_WARM_UP = 4


def peak_activations(runner: PipelineRunner, inputs: Any, targets: Any) -> int:
    """Return the peak bytes that a step allocates beyond parameters and their gradients."""
    if runner.device.type == "cuda":
        return _on_gpu(runner, inputs, targets)
    for _ in range(_WARM_UP):
        runner.step(inputs, targets)
    give_back()
    before = kibibytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    runner.step(inputs, targets)
    return (kibibytes("VmHWM") - before) * 1024


def _on_gpu(runner: PipelineRunner, inputs: Any, targets: Any) -> int:
    """Return the peak bytes of a step beyond the memory allocated before the first step.

    The first step counts because CUDA graphs keep the memory of their activations.
    """
    gradients = sum(p.numel() * p.element_size() for p in runner.parameters() if p.requires_grad)
    before = torch.cuda.memory_allocated(runner.device) + gradients
    for _ in range(_WARM_UP):
        runner.step(inputs, targets)
    torch.cuda.reset_peak_memory_stats(runner.device)
    runner.step(inputs, targets)
    torch.cuda.synchronize(runner.device)
    return torch.cuda.max_memory_allocated(runner.device) - before
