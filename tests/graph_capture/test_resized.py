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


class Transposed(nn.Module):
    """Returns a result that is not contiguous, and its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.project(x).transpose(0, 1), self.project.weight


class Whole(nn.Module):
    """Slices all elements, as models that compute the logits of the last positions do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)[:, slice(0, None)].sum(-1)


class ReturnsWhole(nn.Module):
    """Returns a slice of all elements."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)[:, slice(0, None)]


class Viewed(nn.Module):
    """Returns a view of its argument."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x[:, :2]


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


@pytest.mark.parametrize("module", [Transposed(), Whole()])
def test_strides_and_whole_slices_need_no_further_capture(module: nn.Module) -> None:
    like = capture(module, _x(7, 31)[0], needs_grad=False)
    found = _traced(module).captured(like, _x(7, 31), _x(5, 17))
    expected = capture(module, _x(5, 17)[0], needs_grad=False)
    assert found is not None
    assert (found.inputs, found.outputs) == (expected.inputs, expected.outputs)
    alias = torch.ops.aten.alias.default
    targets = [n.target for n in expected.program.graph.nodes if n.target is not alias]
    assert [n.target for n in found.program.graph.nodes] == targets


def test_a_returned_slice_of_all_elements_is_the_result() -> None:
    module = ReturnsWhole()
    like = capture(module, _x(7, 31)[0], needs_grad=False)
    found = _traced(module).captured(like, _x(7, 31), _x(5, 17))
    if found is not None:
        x = _x(5, 17)[0][0]
        assert torch.equal(found.program.module(check_guards=False)(x), module(x))


@pytest.mark.parametrize("module", [Marked(), Counted(), Viewed()])
def test_sizes_beside_tensors_are_not_guessed(module: nn.Module) -> None:
    like = capture(module, _x(7, 31)[0], needs_grad=False)
    assert _traced(module).captured(like, _x(7, 31), _x(5, 17)) is None


def test_another_graph_is_not_taken() -> None:
    like = capture(nn.Sequential(nn.ReLU(), nn.Tanh()), _x(7, 31)[0], needs_grad=False)
    other = _traced(nn.Sequential(nn.Tanh(), nn.ReLU()))
    assert other.captured(like, _x(7, 31), _x(5, 17)) is None
