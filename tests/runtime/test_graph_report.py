"""The dispatch report describes the use of CUDA graphs."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, dispatch_report


def test_graphs_are_told_only_where_there_are_some() -> None:
    module = add_tvm_dispatch(nn.Linear(4, 4).eval(), torch.randn(2, 4))
    with torch.no_grad():
        module(torch.randn(2, 4))
    report = dispatch_report(module)
    (served,) = report.specializations
    assert (served.graph_replays, served.graph_skips) == (0, {})
    assert "CUDA graph" not in str(report)
    counted = dataclasses.replace(served, graph_replays=5, graph_skips={"it is a test": 2})
    printed = str(dataclasses.replace(report, specializations=[counted, counted]))
    assert "CUDA graphs replayed: 10" in printed
    assert "calls without a CUDA graph: 4, because it is a test" in printed
