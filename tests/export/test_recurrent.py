"""Recurrent layers, and modules that leave values in attributes, run in exported functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import tvmbridge_runtime
from torch import nn
from torch.export import Dim

import tvmbridge


class Recurrent(nn.Module):
    """A module with a layer of each kind and setting."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.LSTM(8, 12, num_layers=2, bidirectional=True, batch_first=True)
        self.projected = nn.LSTM(24, 10, proj_size=7, bidirectional=True)
        self.gru = nn.GRU(14, 9, bias=False, bidirectional=True)
        self.tanh, self.relu = nn.RNN(18, 5), nn.RNN(5, 6, nonlinearity="relu", bias=False)

    def forward(self, x: torch.Tensor, start: torch.Tensor) -> dict[str, Any]:
        y, deep = self.deep(x)
        y, projected = self.projected(y)
        y, gru = self.gru(y)
        y, tanh = self.tanh(y)
        y, relu = self.relu(y, start)
        return {"y": y, "states": [*deep, *projected, gru, tanh, relu]}


class Remembers(nn.Module):
    """A module that leaves values in attributes, which no call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 3), 0
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.hidden = self.linear(x)
        self.calls += 1
        self.seen.append(x * 2)
        self.both = (self.hidden.relu(), self.linear.weight)
        return self.both[0] + 1, self.hidden.t()[1:]


class Checked(nn.Module):
    """A module with a check of values, which also leaves a value."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.normal = torch.distributions.Normal(x, x.exp(), validate_args=True)
        return {"density": self.normal.log_prob(x)}


class Carries(nn.Module):
    """A module whose next call depends on the value that it leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = torch.tanh(self.state + x)
        return self.state * 2


def of_seed(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_recurrent_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, sample = Recurrent().eval(), (of_seed(2, 2, 8), of_seed(1, 2, 6))
    path = tvmbridge.export(module, sample, tmp_path / "model.tvmb")
    report = tvmbridge.compare_export(module, sample, path)
    assert report.ok, str(report)


@pytest.mark.slow
def test_any_number_of_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.LSTM(8, 12, batch_first=True).eval()
    spec = {"input": {0: Dim("batch", max=9), 1: Dim("steps", max=40)}}
    path = tmp_path / "model.tvmb"
    tvmbridge.export(module, of_seed(3, 11, 8), path, dynamic_shapes=spec)
    for batch, steps in ((2, 3), (3, 11), (9, 40), (5, 17)):
        x = of_seed(batch, steps, 8)
        found = tvmbridge_runtime.load(path)(x.numpy())[0]
        torch.testing.assert_close(torch.from_numpy(found), module(x)[0], rtol=1e-4, atol=1e-5)


def test_values_that_forward_leaves_are_no_results(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = Remembers().eval(), of_seed(3, 4)
    path = tvmbridge.export(module, x, tmp_path / "model.tvmb")
    found = tvmbridge_runtime.load(path)(x.numpy())
    assert len(tvmbridge_runtime.read_manifest(path)["outputs"]) == 2
    for ours, theirs in zip(found, module(x), strict=True):
        torch.testing.assert_close(torch.from_numpy(ours), theirs.detach())


def test_checks_are_no_results(tmp_path: Path) -> None:
    module, x = Checked().eval(), of_seed(3, 4)
    path = tvmbridge.export(module, x, tmp_path / "model.tvmb")
    function = tvmbridge_runtime.load(path)
    found = function(x.numpy())
    assert list(found) == ["density"]
    torch.testing.assert_close(torch.from_numpy(found["density"]), module(x)["density"])
    with pytest.raises(tvmbridge_runtime.RuntimeFileError, match="ValueError"):
        function(x.numpy() * float("nan"))


def test_a_value_that_the_next_call_reads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tvmbridge.ExportError, match="forward keeps state from call to call"):
        tvmbridge.export(Carries().eval(), of_seed(3, 4), tmp_path / "model.tvmb")
