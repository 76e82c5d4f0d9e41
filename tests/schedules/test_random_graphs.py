"""Random graphs, fused by FuseOps and scheduled, compute the same as float64 PyTorch."""

from __future__ import annotations

import pytest
import torch

from tests.legalize.compiled import compile_module
from tests.schedules.graphs import random_graph
from tests.thinned import thinned


@pytest.mark.parametrize("seed", thinned(range(60), 6))
def test_random_graph(seed: int) -> None:
    graph = random_graph(seed)
    results = compile_module(graph.mod)(*graph.inputs)
    for result, exact in zip(results, graph.outputs, strict=True):
        scale = max(1.0, exact.abs().max().item())
        torch.testing.assert_close(result.double(), exact, rtol=2e-5, atol=2e-5 * scale)
