"""Pipeline parallelism: one model over several devices, by torch.distributed's engine."""

from __future__ import annotations

from tvmbridge.distributed.api import pipeline
from tvmbridge.distributed.checkpoint import load_checkpoint, save_checkpoint
from tvmbridge.distributed.drawing import draw_timelines
from tvmbridge.distributed.orders import Timeline
from tvmbridge.distributed.plan import Plan, plan_pipeline
from tvmbridge.distributed.runner import PipelineRunner
from tvmbridge.distributed.stage import ZeroBubbleStage

__all__ = [
    "PipelineRunner",
    "Plan",
    "Timeline",
    "ZeroBubbleStage",
    "draw_timelines",
    "load_checkpoint",
    "pipeline",
    "plan_pipeline",
    "save_checkpoint",
]
