"""Which inputs the results of forward depend on: the others need no copies before a call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tvmbridge.graph_capture.capture import capture


class ReturnsMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm(x), self.norm.running_mean * 2


def running(module: nn.Module) -> set[str]:
    """Return the running statistics that the results of forward depend on."""
    captured = capture(module, torch.randn(4, 3))
    read = captured.read_by_results()
    targets = {d.target for d in captured.inputs if d.name in read}
    return {name.rpartition(".")[2] for name in targets & {n for n, _ in module.named_buffers()}}


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.BatchNorm1d(3).train(), set()),
        (nn.BatchNorm1d(3).eval(), {"running_mean", "running_var"}),
        # The new mean depends on the old one; the node that computes it computes both statistics.
        (ReturnsMean().train(), {"running_mean", "running_var"}),
    ],
    ids=["training", "evaluation", "returned"],
)
def test_running_statistics(module: nn.Module, expected: set[str]) -> None:
    assert running(module) == expected
