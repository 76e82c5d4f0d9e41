"""The memory planner's reuse of buffers, counted by hand, and its picture."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

from tvmbridge import add_tvm_dispatch, capture, dispatch_report, to_relax, visualize
from tvmbridge.backends import known_target
from tvmbridge.compiler.buffers import Reuse
from tvmbridge.compiler.build import planned
from tvmbridge.pipeline import inference_passes, run_passes


class Chain(nn.Module):
    """Four products in a row; the planner reuses the first product's buffer for the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


ROWS = 8
BYTES = ROWS * 16 * 4


def module() -> tuple[nn.Module, torch.Tensor]:
    return Chain().eval(), torch.randn(ROWS, 16)


def test_the_report_has_bytes_with_and_without_reuse() -> None:
    made, x = module()
    with torch.no_grad():
        add_tvm_dispatch(made, x)
    (found,) = dispatch_report(made).specializations
    assert found.reuse == {"forward": Reuse(2 * BYTES, 3 * BYTES)}
    assert f"forward: {Reuse(2 * BYTES, 3 * BYTES)}" in str(dispatch_report(made))


def test_lifetimes() -> None:
    made, x = module()
    graph = run_passes(to_relax(capture(made, x)), inference_passes(), [])
    (plan,) = planned(graph, known_target("llvm")).values()
    assert plan.steps == ("tvmbridge.matmul",) * 4
    # Each buffer is written by one product and read by the next; the last buffer is returned.
    assert [(b.storage, b.first, b.last) for b in plan.buffers] == [
        (0, 0, 1),
        (1, 1, 2),
        (0, 2, 3),
        (None, 3, 4),
    ]
    together = [
        (a, b)
        for a in plan.buffers
        for b in plan.buffers
        if a is not b and a.storage == b.storage is not None and a.first <= b.first <= a.last
    ]
    assert not together


def test_the_picture_has_a_row_for_each_memory() -> None:
    made, x = module()
    drawn = visualize(to_relax(capture(made, x))["main"], memory=True)
    assert drawn.source.count(f": {BYTES} bytes") == 2
    assert drawn.source.count("8x16 float32") == 4
    if shutil.which("dot"):
        assert b"</svg>" in drawn.pipe("svg")


def test_sizes_that_are_no_numbers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = module()
    graph = to_relax(capture(made, x))
    monkeypatch.setattr("tvmbridge.inspect.lifetimes.planned", lambda *_: {})
    with pytest.raises(ValueError, match="sizes are numbers"):
        visualize(graph, memory=True)
