"""A graph that is changed to other sizes equals a trace of the module at these sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tvmbridge.graph_capture.any_size import SymbolicTrace, traced_with_symbols
from tvmbridge.graph_capture.capture import capture


class Attention(nn.Module):
    """Attention that uses sizes in views, in a mask and in slices."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, length, _ = x.shape
        q, k, v = self.project(x).view(rows, length, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mask = torch.ones(length, length).tril() / length
        return ((q @ k.mT + mask) @ v)[:, :, : length - 1].reshape(rows, -1), torch.rand(
            rows, length
        )


class Marked(nn.Module):
    """Stores the number of rows in an attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = x.shape[0]
        return x * 2


class Counted(nn.Module):
    """Returns a tensor and a size."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x * 2, x.shape[0]


def _x(rows: int, length: int) -> tuple[Any, dict[str, Any]]:
    return (torch.randn(rows, length, 8),), {}


def _traced(module: nn.Module) -> SymbolicTrace:
    dimensions = [(0, 0), (0, 1)]
    return traced_with_symbols(module, *_x(12, 35), dimensions, needs_grad=False)


def test_graphs_are_those_of_a_trace_of_the_size() -> None:
    module = Attention().eval()
    like = capture(module, _x(7, 31)[0], needs_grad=False)
    traced = _traced(module)
    for size in ((2, 3), (5, 17), (49, 57)):
        found = traced.captured(like, _x(7, 31), _x(*size))
        expected = capture(module, _x(*size)[0], needs_grad=False)
        assert found is not None
        assert (found.inputs, found.outputs) == (expected.inputs, expected.outputs)
        assert found.noise == expected.noise
        nodes = found.program.graph.nodes, expected.program.graph.nodes
        assert list(map(_told, nodes[0])) == list(map(_told, nodes[1])), size


def _told(node: torch.fx.Node) -> Any:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        value = value.shape, value.stride(), value.dtype
    return repr((node, node.target, node.args, node.kwargs, value))


@pytest.mark.parametrize("module", [Marked(), Counted()])
def test_sizes_beside_tensors_are_not_guessed(module: nn.Module) -> None:
    like = capture(module, _x(7, 31)[0], needs_grad=False)
    assert _traced(module).captured(like, _x(7, 31), _x(5, 17)) is None


def test_another_graph_is_not_taken() -> None:
    like = capture(nn.Sequential(nn.ReLU(), nn.Tanh()), _x(7, 31)[0], needs_grad=False)
    other = _traced(nn.Sequential(nn.Tanh(), nn.ReLU()))
    assert other.captured(like, _x(7, 31), _x(5, 17)) is None
