"""Exported functions for any size, and the sizes that they refuse."""

from __future__ import annotations

import random
from pathlib import Path

import numpy
import pytest
import torch
import tvmbridge_runtime
from torch import nn
from torch.export import Dim

import tvmbridge
from tests.export.models import Decoder


class Halves(nn.Module):
    """A module that needs an even length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0] // 2, 2, 8).sum(1)


class Squares(nn.Module):
    """A module that branches on a size: it multiplies square matrices and adds others."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y if x.shape[0] == x.shape[1] else x + y


class Positions(nn.Module):
    """A module with values that depend on weights and on a size, but on no argument's values."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(40, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.table(torch.arange(x.shape[1]))
        mean = self.table.weight[: x.shape[1]].mean(0)
        return self.linear(x + places) * mean + torch.arange(0, x.shape[1], dtype=x.dtype).sum()


def test_values_of_weights_and_sizes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, path = Positions().eval(), tmp_path / "model.tvmb"
    spec = {"x": {1: Dim("length", max=40)}}
    tvmbridge.export(module, torch.randn(2, 9, 8), path, dynamic_shapes=spec)
    function = tvmbridge_runtime.load(path)
    for length in (4, 9, 23, 31):
        x = torch.randn(2, length, 8)
        expected = module(x).detach()
        numpy.testing.assert_allclose(function(x.numpy()), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_any_batch_and_length(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Decoder().eval()
    spec = {"tokens": {0: Dim("batch", max=48), 1: Dim("length", max=64)}}
    path = tmp_path / "model.tvmb"
    tvmbridge.export(module, torch.randint(0, 50, (4, 9)), path, dynamic_shapes=spec)
    function = tvmbridge_runtime.load(path)
    assert function.inputs[0]["shape"] == ["batch", "length"]
    batch, length = function.manifest["symbols"]
    draw = random.Random(0)
    for _ in range(40):
        shape = [draw.randint(s["least"], s["most"]) for s in (batch, length)]
        tokens = torch.randint(0, 50, shape)
        with torch.no_grad():
            expected = module(tokens)
        numpy.testing.assert_allclose(function(tokens.numpy()), expected, rtol=1e-4, atol=1e-5)
    for shape in ((49, 9), (4, 65), (0, 9)):
        with pytest.raises(tvmbridge_runtime.ArgumentError, match=r"'tokens', dimension \d, "):
            function(numpy.zeros(shape, numpy.int64))


def test_conditions_on_sizes_are_checked(tmp_path: Path) -> None:
    dims = {0: Dim("rows", max=64), 1: Dim("columns", max=64)}
    path = tmp_path / "model.tvmb"
    sample = (torch.randn(6, 8), torch.randn(6, 8))
    tvmbridge.export(Squares().eval(), sample, path, dynamic_shapes={"x": dims, "y": dims})
    function = tvmbridge_runtime.load(path)
    x = torch.randn(22, 21)
    numpy.testing.assert_allclose(function(x.numpy(), x.numpy()), x + x, rtol=1e-6)
    with pytest.raises(tvmbridge_runtime.ArgumentError, match="rows != columns"):
        function(x[:21].numpy(), x[:21].numpy())
    with pytest.raises(tvmbridge_runtime.ArgumentError, match="both are rows and must be equal"):
        function(x.numpy(), x[:20].numpy())


class Singles(nn.Module):
    """A module that does something else for two single rows."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * 2, y) if x.shape[0] * y.shape[0] == 1 else (x + 1, y + 1)


class Squeezed(nn.Module):
    """A module that does something else for one row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.squeeze(0) * 2


def test_sizes_of_one_are_served_where_forward_does_the_same(tmp_path: Path) -> None:
    path, spec = tmp_path / "model.tvmb", {"x": {0: Dim("rows")}, "y": {0: Dim("others")}}
    sample = torch.randn(3, 8), torch.randn(4, 8)
    tvmbridge.export(Singles().eval(), sample, path, dynamic_shapes=spec)
    function = tvmbridge_runtime.load(path)
    for rows, others in ((1, 5), (5, 1), (7, 2)):
        x, y = torch.randn(rows, 8), torch.randn(others, 8)
        found = function(x.numpy(), y.numpy())
        assert torch.equal(torch.from_numpy(found[0]), x + 1)
        assert torch.equal(torch.from_numpy(found[1]), y + 1)
    one = numpy.zeros((1, 8), numpy.float32)
    with pytest.raises(tvmbridge_runtime.ArgumentError, match=r"rows > 1.*or.*others > 1"):
        function(one, one)
    spec = {"x": {0: Dim("rows")}}
    tvmbridge.export(Squeezed().eval(), torch.randn(3, 4), path, dynamic_shapes=spec)
    with pytest.raises(tvmbridge_runtime.ArgumentError, match="is 1 and must be from 2"):
        tvmbridge_runtime.load(path)(numpy.zeros((1, 4), numpy.float32))


def test_what_sizes_must_fulfil_is_refused_at_export(tmp_path: Path) -> None:
    spec = {"x": {0: Dim("rows", max=64)}}
    with pytest.raises(tvmbridge.BridgeError, match=r"another way at other sizes.*for each of"):
        tvmbridge.export(Halves().eval(), torch.randn(6, 8), tmp_path / "m", dynamic_shapes=spec)
