"""The backend of ``torch.compile``: graphs that TorchDynamo captures, on the code of a dispatch."""

from __future__ import annotations

from tvmbridge.dynamo.backend import tvmbridge, tvmbridge_aot, tvmbridge_eager
from tvmbridge.dynamo.public import compile
from tvmbridge.dynamo.registry import register_backends_once
from tvmbridge.dynamo.report import CompileReport, GraphReport, compile_report

__all__ = [
    "CompileReport",
    "GraphReport",
    "compile",
    "compile_report",
    "tvmbridge",
    "tvmbridge_aot",
    "tvmbridge_eager",
]

register_backends_once()
