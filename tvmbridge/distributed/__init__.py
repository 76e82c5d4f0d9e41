"""Pipeline parallelism: one model over several devices, by torch.distributed's engine."""

from __future__ import annotations

from tvmbridge.distributed.api import pipeline
from tvmbridge.distributed.orders import Timeline
from tvmbridge.distributed.plan import Plan, plan_pipeline
from tvmbridge.distributed.runner import PipelineRunner

__all__ = ["PipelineRunner", "Plan", "Timeline", "pipeline", "plan_pipeline"]
